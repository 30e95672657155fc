//! The sequence-number trace of a switch, after Fig. 10 of the connection-splicing paper: if the switch did harm, there
//! would be a gap, a step back, or repeated points.

use longsplice_lab::trace::{Packet, Trace};
use plotters::{coord::Shift, prelude::*};
use std::{
    net::SocketAddr,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

const TEXT: (&str, i32) = ("sans-serif", 13);
/// Maximum number of points: more look like one line, and make a slow plot.
const POINTS: usize = 4000;
const SERVER: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const CLIENT: RGBColor = RGBColor(0xd6, 0x5f, 0x0e);

/// When a switch was observed, since the epoch.
#[derive(Clone, Copy, Debug)]
pub struct Switch {
    /// The last time that the flow was seen in its former state.
    pub began: Duration,
    /// The first time that the flow was seen in its new state.
    pub done: Duration,
    /// Time shown before and after the switch.
    pub around: Duration,
}

/// The time since the epoch.
pub fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// One connection, as captured at its host.
#[derive(Debug)]
pub struct Leg {
    /// Each segment with data: time in milliseconds from the switch, and position in the stream.
    data: Vec<(f64, f64)>,
    /// The same for each acknowledgement.
    acks: Vec<(f64, f64)>,
    /// Segments in this period that start below data already seen.
    pub again: usize,
}

impl Leg {
    /// The stream from `sender` to the other end of its connection.
    pub fn new(trace: &Trace, sender: SocketAddr, switch: Switch) -> Option<Leg> {
        let hello = trace.packets.iter().find(|p| p.from == sender && p.flags.syn())?;
        let (receiver, first) = (hello.to, hello.seq.wrapping_add(1));
        let near = |p: &&Packet| {
            p.time + switch.around >= switch.done && p.time <= switch.done + switch.around && !p.flags.syn()
        };
        let point =
            |p: &Packet, number: u32| (milliseconds(p.time, switch.done), f64::from(number.wrapping_sub(first)));
        let sent: Vec<Packet> = trace.direction(sender, receiver).iter().filter(near).copied().collect();
        let mut end = None;
        let mut again = 0;
        for p in sent.iter().filter(|p| p.len > 0) {
            let (from, to) = (p.seq.wrapping_sub(first), p.seq.wrapping_sub(first).wrapping_add(p.len));
            again += usize::from(end.is_some_and(|end| from < end));
            end = end.max(Some(to));
        }
        let data = sent.iter().filter(|p| p.len > 0).map(|p| point(p, p.seq)).collect();
        let acks = trace.direction(receiver, sender).iter().filter(near).map(|p| point(p, p.ack)).collect();
        Some(Leg { data, acks, again })
    }

    /// Longest time between two segments with data, in milliseconds.
    pub fn longest_pause(&self) -> f64 {
        self.data.windows(2).map(|w| w[1].0 - w[0].0).fold(0.0, f64::max)
    }
}

fn milliseconds(time: Duration, zero: Duration) -> f64 {
    (time.as_secs_f64() - zero.as_secs_f64()) * 1000.0
}

/// Plots both legs into `file`. `what` happened to the download during the `band`.
pub fn draw(
    file: &Path,
    [what, band]: [&str; 2],
    server: &Leg,
    client: &Leg,
    switch: Switch,
) -> Result<(), Box<dyn std::error::Error>> {
    let root = SVGBackend::new(file, (1000, 640)).into_drawing_area();
    root.fill(&WHITE)?;
    let caption = format!("A download while {what}: sequence numbers at server and client");
    panel(&root, &caption, band, server, client, switch)?;
    root.present()?;
    Ok(())
}

/// Plots one panel. `band`: the label of the switch, of which the part before a comma names it.
pub fn panel(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    caption: &str,
    band: &str,
    server: &Leg,
    client: &Leg,
    switch: Switch,
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || [&server.data, &client.data].into_iter().flatten();
    let Some(zero) = points().map(|p| p.1).reduce(f64::min) else {
        return Err("no segment was captured around the switch".into());
    };
    let top = points().map(|p| p.1).fold(zero, f64::max);
    let megabytes = |p: &(f64, f64)| (p.0, (p.1 - zero) / 1e6);
    let height = ((top - zero) / 1e6 * 1.05).max(0.1);
    let limit = switch.around.as_secs_f64() * 1000.0;

    let mut chart = ChartBuilder::on(area)
        .caption(caption, ("sans-serif", 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(60)
        .build_cartesian_2d(-limit..limit, 0.0..height)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .x_desc(format!("milliseconds from the {}", band.split(',').next().unwrap_or(band)))
        .y_desc("megabytes of the stream")
        .label_style(("sans-serif", 14))
        .draw()?;
    let began = milliseconds(switch.began, switch.done).max(-limit);
    let shade = Rectangle::new([(began, 0.0), (0.0, height)], BLACK.mix(0.10).filled());
    let key = |style: ShapeStyle| move |(x, y)| Rectangle::new([(x, y - 4), (x + 12, y + 4)], style);
    chart.draw_series([shade])?.label(band).legend(key(BLACK.mix(0.25).filled()));
    chart.draw_series([PathElement::new([(0.0, 0.0), (0.0, height)], BLACK)])?;
    for (leg, colour, name) in [(server, SERVER, "server's connection"), (client, CLIENT, "client's connection")] {
        let acks = thin(&leg.acks).map(megabytes).filter(|p| (0.0..=height).contains(&p.1));
        let line = colour.mix(0.5).stroke_width(1);
        chart
            .draw_series(LineSeries::new(acks, line))?
            .label(format!("{name}: acknowledged"))
            .legend(key(line.color.filled()));
        let size = if colour == SERVER { 4 } else { 2 };
        let style = if colour == SERVER { colour.stroke_width(1) } else { colour.filled() };
        let dots = thin(&leg.data).map(megabytes).map(|p| Circle::new(p, size, style));
        chart
            .draw_series(dots)?
            .label(format!("{name}: segments"))
            .legend(move |(x, y)| Circle::new((x + 6, y), size, style));
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft)
}

/// Draws the legend.
pub fn legend<'a, X: Ranged + 'a, Y: Ranged + 'a>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
    position: SeriesLabelPosition,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut labels = chart.configure_series_labels();
    labels.position(position).background_style(WHITE.mix(0.85));
    labels.border_style(BLACK.mix(0.3)).label_font(TEXT).draw()?;
    Ok(())
}

fn thin(points: &[(f64, f64)]) -> impl Iterator<Item = &(f64, f64)> {
    points.iter().step_by(points.len().div_ceil(POINTS).max(1))
}
