//! Translucent proxies, as the TPOT paper measures them: the time until the first byte of a short connection (its Table 3), and
//! transfers over long and lossy paths, with a proxy half way, or two at its thirds. Network, ends and figures are those of
//! [`wan`](super::wan).

use super::{
    Bench, Result, bulk,
    machine::{Machine, today},
    network::Packets,
    rate, report,
    results::{FORMAT, Summary},
    segment,
    variant::Variant,
    wan::{self, Row},
};
use crate::{
    args::{WanArgs, WanPart},
    cell::{Cell, Congestion, Distance, Middle, Place, Size},
};
use longsplice_lab::Shape;
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

/// Name of the result file. It is separate from the other results, because it is measured at another time.
pub const JSON: &str = "tpot.json";

/// The contents of the result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TpotResults {
    /// [`FORMAT`].
    pub format: u32,
    /// Day in UTC.
    pub date: String,
    /// Where and with what the results were measured.
    pub machine: Machine,
    /// Number of rounds.
    pub rounds: usize,
    /// The cells.
    pub rows: Vec<Row>,
    /// What a connection and a segment cost, without delays.
    pub costs: Option<Costs>,
}

/// What a connection and a segment cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// Day in UTC: cells take longer, and may have been measured on another one.
    pub date: String,
    /// Number of rounds.
    pub rounds: usize,
    /// Medians.
    pub summary: Summary,
}

/// Bytes of the segments whose costs are compared. The larger one fits the MTU with the headers of a tunnel.
const SEGMENTS: [u64; 2] = [1, 1400];
/// Connections at a time in bulk.
const BULK: u64 = 8;
/// Ways of forwarding whose costs are compared.
const COMPARED: [Variant; 6] = [
    Variant::Direct,
    Variant::IpForward,
    Variant::BesideTpot,
    Variant::CopyTpot,
    Variant::SplicedTpot,
    Variant::SplicedTpotUdp,
];

/// Measures the chosen parts, with the chosen cells or a selection.
pub fn measure(bench: &Bench, args: &WanArgs) -> Result<TpotResults> {
    let mut rows = Vec::new();
    if args.wants(WanPart::Cells) {
        let venues = wan::venues(Middle::TPOT, Shape::TwoForwarders)?;
        rows = wan::rows(bench, "tpot", &venues, args.chosen().unwrap_or_else(selection))?;
    }
    let mut costs = None;
    if args.wants(WanPart::Costs) {
        let mut cases = segment::cases(bench, &SEGMENTS, &COMPARED)?;
        cases.push(rate::case(bench, 1, &COMPARED[1..])?);
        for packets in [Packets::Large, Packets::Mtu] {
            let venues = bulk::venues(bench, packets, &COMPARED[1..])?;
            cases.push(bulk::case(bench, packets, BULK, &COMPARED[1..], &venues)?);
        }
        costs = Some(Costs { date: today(), rounds: bench.rounds, summary: Summary::of(&cases) });
    }
    Ok(TpotResults { format: FORMAT, date: today(), machine: Machine::here(), rounds: bench.rounds, rows, costs })
}

/// One byte from near and far, a large object over growing distances, and a smaller one with losses.
fn selection() -> Vec<Cell> {
    let cell = |ms, bytes, loss| Cell {
        distance: Distance { place: Place::Both, ms },
        size: Size(bytes),
        congestion: Congestion::Reno,
        loss,
        ..Cell::BASE
    };
    let first = [1, 100].map(|ms| cell(ms, 1, 0.0));
    let far = [1, 10, 50, 100, 300].map(|ms| cell(ms, 5_000_000, 0.0));
    let lossy = [0.1, 1.0].map(|loss| cell(50, 2_000_000, loss));
    let thirds = [cell(100, 1, 0.0), cell(100, 5_000_000, 0.0), cell(300, 5_000_000, 0.0), cell(60, 2_000_000, 1.0)]
        .map(|cell| Cell { distance: Distance { place: Place::Thirds, ..cell.distance }, ..cell });
    first.into_iter().chain(far).chain(lossy).chain(thirds).collect()
}

impl TpotResults {
    /// Writes the file, beside other results or alone.
    pub fn write(&self, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir)?;
        Ok(fs::write(dir.join(JSON), serde_json::to_string_pretty(self)? + "\n")?)
    }

    /// Formats the results with a heading, as Markdown.
    pub fn text(&self) -> String {
        let head = format!("## Translucent proxies, measured on {}", self.date);
        let times = format!(
            "Seconds from connecting until the last byte has arrived, and the ratio to routing (medians of {} rounds):",
            self.rounds
        );
        let cells = if self.rows.is_empty() { String::new() } else { wan::tables(&self.rows, &times) };
        let costs = self.costs.as_ref().map_or_else(String::new, |costs| {
            format!("### Costs, measured on {}\n\n{}", costs.date, report::costs(&costs.summary, costs.rounds))
        });
        format!("{head}\n\n{}.\n\n{cells}{costs}", report::machine(&self.machine))
    }
}
