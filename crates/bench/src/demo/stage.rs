//! The set-up of the demo: three hosts, nginx, the proxy, a download; and its removal.

use longsplice::{netns_inode, pin_folder};
use longsplice_lab::{ChildGuard, Family, Lab, Namespace, Shape, pattern, topology};
use sha2::{Digest, Sha256};
use std::{
    error::Error,
    fs::{self, File},
    io::{BufWriter, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
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
/// Time limit for starting programs.
const START: Duration = Duration::from_secs(10);

/// The whole set-up. Fields are dropped in order: programs before their namespaces.
pub struct Stage {
    pub proxy: ChildGuard,
    _nginx: ChildGuard,
    _pins: Pins,
    pub lab: Lab,
    pub control: PathBuf,
    /// SHA-256 of the file that nginx serves.
    pub digest: String,
    _dir: tempfile::TempDir,
}

impl Stage {
    /// Sets the stage. `threshold`: bytes after which the proxy splices.
    pub fn set(threshold: u64) -> Result<Stage> {
        let dir = tempfile::Builder::new().prefix("longsplice-demo-").tempdir()?;
        let digest = make_file(&dir.path().join("file"), SIZE)?;
        let lab = Lab::simple(Shape::TwoDevices)?;
        let nginx = start_nginx(&lab.server, dir.path(), RATE)?;
        let pins = Pins(pin_folder(netns_inode(&lab.forwarder.path())?));
        let control = dir.path().join("control.sock");
        let mut run = command(&lab.forwarder, &control)?;
        run.args(["run", "--socks5", &proxy_address(), "--splice", &threshold.to_string(), "--access-log"]);
        run.arg(dir.path().join("access.log"));
        let mut proxy = ChildGuard::spawn(&mut run)?;
        proxy.wait_output("control socket", START).map_err(|e| format!("{e}; it said:\n{}", proxy.output()))?;
        Ok(Stage { proxy, _nginx: nginx, _pins: pins, lab, control, digest, _dir: dir })
    }

    /// Runs longsplice in the forwarder's namespace.
    pub fn longsplice(&self, arguments: &[&str]) -> Result<String> {
        let output = command(&self.lab.forwarder, &self.control)?.args(arguments).output()?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(format!("longsplice {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()).into())
    }

    /// Segments retransmitted by the server so far.
    pub fn retransmitted(&self) -> u64 {
        self.lab.server.counter("Tcp", "RetransSegs").unwrap_or(0)
    }

    /// Processor time of the proxy in seconds; `None` if it has exited.
    pub fn cpu(&self) -> Option<f64> {
        /// USER_HZ, part of the kernel's interface (proc(5)).
        const TICKS: f64 = 100.0;
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.proxy.pid())).ok()?;
        // utime and stime are fields 14 and 15; the second one, the name, ends with the last parenthesis.
        let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().skip(11).take(2).flat_map(str::parse::<u64>).sum();
        Some(ticks as f64 / TICKS)
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

fn command(namespace: &Namespace, control: &Path) -> Result<Command> {
    let program = crate::program()?;
    let mut command = namespace.command(program.to_str().ok_or("the path of this program is no text")?);
    command.env("LONGSPLICE_CONTROL", control).env_remove("RUST_LOG");
    Ok(command)
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

/// Starts nginx as one process without a master: a worker would outlive a killed master.
/// `rate`: bytes per second that it sends.
pub fn start_nginx(server: &Namespace, dir: &Path, rate: u64) -> Result<ChildGuard> {
    let config = dir.join("nginx.conf");
    let text = format!(
        "daemon off;\nmaster_process off;\nuser root;\npid {dir}/nginx.pid;\nerror_log stderr;\nevents {{}}\n\
         http {{\n  access_log off;\n  sendfile on;\n  sendfile_max_chunk {CHUNK};\n  server {{\n    listen {address};\n    root {dir};\n    \
         limit_rate {rate};\n  }}\n}}\n",
        dir = dir.display(),
        address = topology::SERVER.port(Family::V4, HTTP),
    );
    fs::write(&config, text)?;
    let mut nginx = server.command("nginx");
    nginx.arg("-e").arg("stderr").arg("-p").arg(dir).arg("-c").arg(&config);
    let nginx = ChildGuard::spawn(&mut nginx)?;
    server.wait_listening(HTTP, START).map_err(|e| format!("nginx: {e}; it said:\n{}", nginx.output()))?;
    Ok(nginx)
}

/// The pins in bpffs left by the killed proxy, in case the demo does not reach `longsplice stop --flush`.
struct Pins(PathBuf);

impl Drop for Pins {
    fn drop(&mut self) {
        // Already gone if all went well.
        let _ = fs::remove_dir_all(&self.0);
    }
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
        let digest = self.hashing.take().ok_or("asked twice")?.join().map_err(|_| "hashing failed")??;
        let status = self.curl.wait()?;
        if status.success() { Ok(digest) } else { Err(format!("curl: {status}").into()) }
    }
}

impl Drop for Download {
    fn drop(&mut self) {
        // Ended long ago if all went well.
        let _ = self.curl.kill();
        let _ = self.curl.wait();
    }
}
