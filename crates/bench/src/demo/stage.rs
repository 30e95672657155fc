//! The set-up of the demo: three hosts, nginx, the proxy, a download; and its removal.

use crate::bench::{
    machine::seconds_of,
    peers::Peer,
    variant::Variant,
    venue::{OURS, Venue},
};
use longsplice_lab::{Family, Lab, Shape, pattern, topology};
use sha2::{Digest, Sha256};
use std::{
    error::Error,
    fs::File,
    io::{BufWriter, Read, Write},
    path::Path,
    process::{Child, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// File size: long enough to splice, watch and kill at [`RATE`].
pub const SIZE: u64 = 1 << 30;
/// Bytes per second that nginx sends: slow enough that a small machine can copy it, too, so that the plots are comparable.
pub const RATE: u64 = 64 << 20;
/// Bytes that nginx sends at a time: the steps in the plot.
const CHUNK: u64 = 256 << 10;
/// Port of nginx.
pub const HTTP: u16 = 80;
/// Port of the proxy.
pub const SOCKS: u16 = 1080;
/// Seed of the file's contents: arbitrary but fixed, so that runs are comparable.
const SEED: u64 = 0x1090_511c;

/// The whole set-up. The venue's ends are the SHA-256 of the file that nginx serves.
pub type Stage = Venue<String>;

impl Stage {
    /// Sets the stage. `threshold`: bytes after which the proxy splices.
    pub fn set(threshold: u64) -> Result<Stage> {
        let mut venue = Venue::new(Variant::Default, Lab::simple(Shape::TwoDevices)?)?;
        let digest = make_file(&venue.path("file"), SIZE)?;
        start_nginx(&mut venue, RATE)?;
        let (at, threshold) = (venue.lab.forwarder.clone(), threshold.to_string());
        let arguments = ["--socks5", &proxy_address(), "--splice", &threshold, "--access-log", "access.log"];
        venue.longsplice(&at, OURS, "", &arguments)?;
        Ok(venue.with(digest))
    }

    /// Segments retransmitted by the server so far.
    pub fn retransmitted(&self) -> u64 {
        self.lab.server.counter("Tcp", "RetransSegs").unwrap_or(0)
    }

    /// Processor time of the proxy in seconds; `None` if it has exited.
    pub fn cpu(&self) -> Option<f64> {
        seconds_of(self.pid()?)
    }
}

/// The proxy's address in the form used by curl.
pub fn proxy_address() -> String {
    topology::FORWARDER_TO_CLIENT.port(Family::V4, SOCKS).to_string()
}

/// The URL that curl fetches.
pub fn url() -> String {
    format!("http://{}/file", topology::SERVER.v4)
}

/// Creates the file and returns its digest.
pub fn make_file(path: &Path, size: u64) -> Result<String> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 20];
    for at in (0..size).step_by(block.len()) {
        pattern::fill(SEED, at, &mut block);
        hash.update(&block);
        file.write_all(&block)?;
    }
    file.flush()?;
    Ok(hex(&hash.finalize()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Starts nginx as one process without a master: a worker would outlive a killed master. It serves the files of the venue.
/// `rate`: bytes per second that it sends.
pub fn start_nginx(venue: &mut Venue, rate: u64) -> Result<()> {
    let config = format!(
        "daemon off;\nmaster_process off;\nuser root;\nerror_log stderr;\nevents {{}}\nhttp {{\n  access_log off;\n  \
         sendfile on;\n  sendfile_max_chunk {CHUNK};\n  server {{\n    listen {address};\n    root {dir};\n    \
         limit_rate {rate};\n  }}\n}}\n",
        dir = venue.path("").display(),
        address = topology::SERVER.port(Family::V4, HTTP),
    );
    let server = venue.lab.server.clone();
    venue.peer(&server, Peer::Nginx, "nginx", &config, HTTP)
}

/// curl in the client's namespace, and the digest of its download.
pub struct Download {
    curl: Child,
    received: Arc<AtomicU64>,
    hashing: Option<JoinHandle<std::io::Result<String>>>,
}

impl Download {
    /// `arguments`: those of curl beside the usual ones.
    pub fn start(lab: &Lab, arguments: &[&str]) -> Result<Download> {
        let mut curl = lab.client.command("curl");
        curl.args(["--silent", "--show-error", "--fail", "--noproxy", ""]).args(arguments);
        let mut curl = curl.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut body = curl.stdout.take().expect("piped above");
        let received = Arc::new(AtomicU64::new(0));
        let count = received.clone();
        let hashing = std::thread::spawn(move || {
            let mut hash = Sha256::new();
            let mut block = vec![0; 1 << 18];
            loop {
                let n = body.read(&mut block)?;
                if n == 0 {
                    return Ok(hex(&hash.finalize()));
                }
                hash.update(&block[..n]);
                count.fetch_add(n as u64, Relaxed);
            }
        });
        Ok(Download { curl, received, hashing: Some(hashing) })
    }

    /// Bytes received so far.
    pub fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// Whether the download has ended, successfully or not.
    pub fn ended(&self) -> bool {
        self.hashing.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// After the end: the digest, or curl's error.
    pub fn digest(&mut self) -> Result<String> {
        let (digest, status) = self.outcome()?;
        if status.success() { Ok(digest) } else { Err(format!("curl: {status}").into()) }
    }

    /// After the end: the digest, and what curl thinks of it.
    pub fn outcome(&mut self) -> Result<(String, ExitStatus)> {
        let digest = self.hashing.take().ok_or("asked twice")?.join().map_err(|_| "hashing failed")??;
        Ok((digest, self.curl.wait()?))
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // Ended long ago if all went well.
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }
}
