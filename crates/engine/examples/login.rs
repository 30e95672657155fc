//! A gateway with a login: a client sends a name on a line of its own, and is connected if the name is known.
//! Usage: `login LISTEN TARGET NAME...`. Bytes that the client has sent after its name go to the server first.

use longsplice_engine::{FlowInfo, Leftovers, Leg, OpenOptions, Policy, Refusal, Splicer};
use std::{env, error::Error, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Maximum length of a name in bytes, and the time that a client has to send it.
const LONGEST: usize = 64;
const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = env::args().skip(1);
    let mut address = || args.next().ok_or("login LISTEN TARGET NAME...")?.parse().map_err(Box::<dyn Error>::from);
    let [listen, target]: [SocketAddr; 2] = [address()?, address()?];
    let known: Arc<[String]> = args.collect();
    let splicer = Splicer::open(&OpenOptions::default()).unwrap_or_else(|error| {
        eprintln!("connections are copied, not spliced: {error}");
        Splicer::copying(Refusal::from(&error))
    });
    let listener = splicer.listen(listen).await?;
    eprintln!("listening on {}", listener.local_addr()?);
    loop {
        let client = listener.accept().await?;
        let (splicer, known) = (splicer.clone(), known.clone());
        tokio::spawn(async move {
            let from = client.remote();
            if let Err(error) = serve(&splicer, client, target, &known).await {
                eprintln!("{from}: {error}");
            }
        });
    }
}

async fn serve(splicer: &Splicer, mut client: Leg, target: SocketAddr, known: &[String]) -> io::Result<()> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no name in time");
    let (name, rest) = timeout(PATIENCE, read_name(&mut client)).await.map_err(late)??;
    if !known.contains(&name) {
        client.write_all(b"unknown\n").await?;
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, format!("{name:?} is not known")));
    }
    let server = splicer.connect(target, &client).await?;
    client.write_all(b"welcome\n").await?;
    // from here on, the engine has both connections, and splices them when that pays
    let left = Leftovers::for_server(rest);
    let info = FlowInfo::new("login", target.to_string()).with_user(Some(name));
    let ended = splicer.relay(client, server, left, Arc::new(Policy::default()), info).await;
    eprintln!("{ended:?}");
    Ok(())
}

/// Reads the name. Returns it with the bytes that followed.
async fn read_name(client: &mut Leg) -> io::Result<(String, Vec<u8>)> {
    let mut came = Vec::new();
    loop {
        if let Some(end) = came.iter().position(|byte| *byte == b'\n') {
            let rest = came.split_off(end + 1);
            return Ok((String::from_utf8_lossy(&came).trim_end().to_owned(), rest));
        }
        if came.len() > LONGEST || client.read_buf(&mut came).await? == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no name"));
        }
    }
}
