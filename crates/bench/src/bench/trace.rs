//! Sequence numbers of one connection with continuous data across splice, unsplice, release and recreation: one plot for
//! each, like Fig. 10 of the connection-splicing paper.

use super::{
    Bench, Result,
    bulk::{receive, send},
    network::{self, Packets},
    variant::Variant,
    venue::{Near, OURS, Pair},
};
use crate::plot::{Leg, Switch, now, panel};
use longsplice::Ask;
use longsplice_lab::{process::wait_for, trace::Tap};
use plotters::prelude::*;
use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

/// Pause of the server between blocks: a flow that is never idle cannot be recreated.
const PACE: Duration = Duration::from_millis(4);
/// Time between two switches, and the time shown before and after each. New sockets start with a small window, and data
/// beyond it has to be retransmitted: this takes a retransmission timeout, and has to be visible.
const APART: Duration = Duration::from_millis(350);
const AROUND: [Duration; 2] = [Duration::from_millis(60), APART];
/// Seconds after which a spliced flow is released: longer than it is spliced before that.
const RELEASE: f64 = 1.5;
/// Time limit for a switch, a release included.
const PATIENCE: Duration = Duration::from_secs(10);
const SIZE: (u32, u32) = (1600, 1100);

const RECREATION: &str = "recreation";

/// An observed switch, and its name.
struct Seen {
    what: &'static str,
    switch: Switch,
}

/// Takes the connection through all states, and plots the packets at both hosts.
pub fn draw(bench: &Bench<'_>, file: &Path) -> Result<()> {
    let venue = Near::releasing(Variant::Copy, Packets::Large, Some(RELEASE))?;
    let taps = (Tap::start(&venue.lab.server, "s0")?, Tap::start(&venue.lab.client, "c0")?);
    let Pair { client, server } = venue.connect(1)?.remove(0);
    let (at_server, at_client) = (server.local_addr()?, network::proxy());
    let stop = Arc::new(AtomicBool::new(false));
    let told = stop.clone();
    let sender = thread::spawn(move || send(server, &told, PACE));
    let receiver = thread::spawn(move || receive(client, &AtomicU64::new(0)));
    let seen = switches(bench, &venue);
    stop.store(true, Relaxed);
    let over = "a host of the trace panicked";
    sender.join().map_err(|_| over)??;
    receiver.join().map_err(|_| over)??;
    let seen = seen?;
    let traces = (taps.0.stop()?, taps.1.stop()?);

    let root = SVGBackend::new(file, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, Seen { what, switch }) in root.split_evenly((2, 2)).iter().zip(seen) {
        let missing = "the trace has no connection";
        let server = Leg::new(&traces.0, at_server, switch).ok_or(missing)?;
        let client = Leg::new(&traces.1, at_client, switch).ok_or(missing)?;
        let (again, pause) = (client.again, client.longest_pause());
        bench.say(&format!("trace, {what}: {again} segments came twice, longest pause {pause:.0} ms"));
        panel(area, &format!("{what}: sequence numbers at server and client"), what, &server, &client, switch)?;
    }
    root.present()?;
    Ok(())
}

fn switches(bench: &Bench<'_>, venue: &Near) -> Result<[Seen; 4]> {
    Ok([
        switch(bench, venue, "splice", Some(|id| Ask::Splice { id }), "spliced")?,
        switch(bench, venue, "unsplice", Some(|id| Ask::Unsplice { id }), "copying")?,
        {
            switch(bench, venue, "second splice", Some(|id| Ask::Splice { id }), "spliced")?;
            switch(bench, venue, "release", None, "released")?
        },
        switch(bench, venue, RECREATION, Some(|id| Ask::Unsplice { id }), "copying")?,
    ])
}

/// Asks for a switch if it does not happen by itself, and watches until the flow is in that state.
fn switch(
    bench: &Bench<'_>,
    venue: &Near,
    what: &'static str,
    ask: Option<fn(u64) -> Ask>,
    state: &str,
) -> Result<Seen> {
    bench.check()?;
    let mut control = venue.control(OURS)?;
    let id = longsplice::flows(&mut control)?.pop().ok_or("the flow is gone")?.id;
    thread::sleep(APART);
    let mut began = now();
    if let Some(ask) = ask {
        control.ask(ask(id))?;
    }
    let done = wait_for(PATIENCE, || match longsplice::flows(&mut control) {
        Err(e) => Some(Err(e.to_string())),
        Ok(rows) if rows.iter().any(|row| row.id == id && row.state == state) => Some(Ok(now())),
        Ok(_) => {
            if ask.is_none() {
                began = now();
            }
            None
        }
    });
    let done = done.ok_or_else(|| format!("{what}: the flow was not {state} in time"))??;
    thread::sleep(APART);
    let around = if what == RECREATION { AROUND[1] } else { AROUND[0] };
    Ok(Seen { what, switch: Switch { began, done, around } })
}
