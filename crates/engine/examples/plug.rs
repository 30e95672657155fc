//! A plug: connections to one address go to another. Usage: `plug
//! LISTEN TARGET`, for example `plug 192.0.2.1:5432 198.51.100.7:5432`. Stops cleanly on SIGINT and SIGTERM.

use longsplice_engine::{FlowInfo, Leftovers, OpenOptions, Policy, Refusal, Splicer};
use std::{env, error::Error, net::SocketAddr, sync::Arc};
use tokio::signal::{
    ctrl_c,
    unix::{SignalKind, signal},
};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let mut address = || args.next().ok_or("plug LISTEN TARGET")?.parse().map_err(Box::<dyn Error>::from);
    let [listen, target]: [SocketAddr; 2] = [address()?, address()?];
    let splicer = Splicer::open(&OpenOptions::default()).unwrap_or_else(|error| {
        eprintln!("connections are copied, not spliced: {error}");
        Splicer::copying(Refusal::from(&error))
    });
    let listener = splicer.listen(listen).await?;
    eprintln!("listening on {}", listener.local_addr()?);
    let mut terminated = signal(SignalKind::terminate())?;
    loop {
        let client = tokio::select! {
            client = listener.accept() => client?,
            _ = ctrl_c() => break,
            _ = terminated.recv() => break,
        };
        let splicer = splicer.clone();
        tokio::spawn(async move {
            let Ok(server) = splicer.connect(target, &client).await else { return client.reset() };
            let info = FlowInfo::new("plug", target.to_string());
            let ended = splicer.relay(client, server, Leftovers::default(), Arc::new(Policy::default()), info).await;
            eprintln!("{ended:?}");
        });
    }
    drop(listener);
    splicer.stop(false); // true: spliced connections go on without this process
    splicer.ended().await;
    splicer.close()?; // nothing is left attached or pinned
    Ok(())
}
