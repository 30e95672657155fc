//! A SOCKS 5 server without authentication (RFC 1928); CONNECT to addresses only. Usage: `socks LISTEN`.

use longsplice_engine::{FlowInfo, Leftovers, Leg, OpenOptions, Policy, Refusal, Splicer};
use std::{env, error::Error, io, net::SocketAddr, sync::Arc, time::Duration};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

/// Time that a client has to send its request.
const PATIENCE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listen: SocketAddr = env::args().nth(1).ok_or("socks LISTEN")?.parse()?;
    let splicer = Splicer::open(&OpenOptions::default()).unwrap_or_else(|error| {
        eprintln!("connections are copied, not spliced: {error}");
        Splicer::copying(Refusal::from(&error))
    });
    let listener = splicer.listen(listen).await?;
    eprintln!("listening on {}", listener.local_addr()?);
    loop {
        let client = listener.accept().await?;
        let splicer = splicer.clone();
        tokio::spawn(async move {
            let from = client.remote();
            if let Err(error) = serve(&splicer, client).await {
                eprintln!("{from}: {error}");
            }
        });
    }
}

async fn serve(splicer: &Splicer, mut client: Leg) -> io::Result<()> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "no request in time");
    let target = timeout(PATIENCE, read_target(&mut client)).await.map_err(late)??;
    let server = splicer.connect(target, &client).await;
    // a reply without a useful address, as most servers send it
    let answer = |code| [5, code, 0, 1, 0, 0, 0, 0, 0, 0];
    client.write_all(&answer(u8::from(server.is_err()))).await?;
    let info = FlowInfo::new("socks5", target.to_string());
    let ended = splicer.relay(client, server?, Leftovers::default(), Arc::new(Policy::default()), info).await;
    eprintln!("{ended:?}");
    Ok(())
}

async fn read_target(client: &mut Leg) -> io::Result<SocketAddr> {
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let [version, methods] = read(client).await?;
    if version != 5 {
        return Err(wrong("not SOCKS 5"));
    }
    client.read_exact(&mut vec![0; methods.into()]).await?;
    client.write_all(&[5, 0]).await?; // no authentication
    let [_version, command, _reserved, kind] = read(client).await?;
    let ip = match (command, kind) {
        (1, 1) => read::<4>(client).await?.into(),
        (1, 4) => std::net::IpAddr::from(read::<16>(client).await?),
        _ => {
            client.write_all(&[5, if command == 1 { 8 } else { 7 }, 0, 1, 0, 0, 0, 0, 0, 0]).await?;
            return Err(wrong("only CONNECT to an address is served"));
        }
    };
    Ok(SocketAddr::new(ip, u16::from_be_bytes(read(client).await?)))
}

async fn read<const N: usize>(client: &mut Leg) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    client.read_exact(&mut bytes).await?;
    Ok(bytes)
}
