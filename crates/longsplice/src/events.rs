//! `longsplice events`: what happens in the running proxy, as JSON lines.

use crate::{
    Outcome,
    client::{AskError, Client},
    control::Ask,
    which::EventsArgs,
};
use longsplice_proxy::events::Wanted;
use std::{
    io::{self, Write},
    path::Path,
};

/// `longsplice events`.
pub fn events(control: Option<&Path>, EventsArgs { listener, kind }: &EventsArgs) -> Outcome {
    let mut client = Client::connect(control)?;
    let wanted = Wanted { listener: listener.clone(), kinds: kind.clone() };
    client.send(Ask::Events(wanted))?;
    let mut line = client.line()?;
    client.read(&line)?;
    client.wait_long()?;
    let mut out = io::stdout().lock();
    loop {
        out.write_all(line.as_bytes())?;
        out.flush()?;
        line = match client.line() {
            Ok(line) if line.ends_with('\n') => line,
            // the last one may be cut off
            Ok(_) | Err(AskError::HungUp(_)) => {
                return Err("the proxy has ended, or nothing was read for too long".into());
            }
            Err(e) => return Err(e.into()),
        };
    }
}
