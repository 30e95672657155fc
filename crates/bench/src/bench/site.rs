//! Reverse proxies in front of two addresses of one nginx, which serves files: the origin is the same for all.

use super::{
    Result,
    network::{PATIENCE, PORT, Packets, Pins, lab, proxy},
    peers::Peer,
    programs::{control_socket, run_longsplice, when_ready},
    variant::Variant,
};
use longsplice_lab::{ChildGuard, Family, Lab, pattern, topology};
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
};

/// The variants compared, in the order of tables.
pub const VARIANTS: [Variant; 6] =
    [Variant::IpForward, Variant::Spliced, Variant::Default, Variant::Copy, Variant::Haproxy, Variant::Nginx];

/// The files served. Each is named after its size, and has known contents ([`pattern`], with the size as the seed).
pub struct Files(tempfile::TempDir);

impl Files {
    /// Creates a file of each size.
    pub fn make(sizes: &[u64]) -> Result<Files> {
        let dir = tempfile::Builder::new().prefix("longsplice-bench-files-").tempdir()?;
        let mut block = vec![0; 1 << 20];
        for &size in sizes {
            let mut file = BufWriter::new(File::create(dir.path().join(size.to_string()))?);
            for at in (0..size).step_by(block.len()) {
                let part = &mut block[..(size - at).min(1 << 20) as usize];
                pattern::fill(size, at, part);
                file.write_all(part)?;
            }
            file.flush()?;
        }
        Ok(Files(dir))
    }
}

/// A lab with an origin, and a variant in the middle. Fields are dropped in order: programs before their namespaces.
pub struct Site {
    /// The variant in the middle.
    pub variant: Variant,
    _proxy: Option<ChildGuard>,
    _origin: ChildGuard,
    _pins: Pins,
    /// The network.
    pub lab: Lab,
    dir: tempfile::TempDir,
}

impl Site {
    /// Sets up a site. `arguments`: further arguments of longsplice.
    pub fn set(variant: Variant, arguments: &[&str], files: &Files) -> Result<Site> {
        let dir = tempfile::Builder::new().prefix("longsplice-bench-").tempdir()?;
        let lab = lab(Packets::Large, variant.routed())?;
        let pins = Pins::of(&lab)?;
        let mut run = lab.server.command(Peer::Nginx.program());
        let origin = nginx(&mut run, dir.path(), "origin", &origin_config(files.0.path(), dir.path()))?;
        let origin = when_ready(origin, |_| lab.server.wait_listening(PORT, PATIENCE))?;
        let mut run = lab.forwarder.command(variant.peer().map_or("", Peer::program));
        let config = config(variant);
        let proxy = match variant.peer() {
            None if variant.routed() => None,
            None => Some(run_longsplice(&lab.forwarder, dir.path(), &config, arguments, PATIENCE)?),
            Some(Peer::Haproxy) => {
                let file = dir.path().join("haproxy.cfg");
                fs::write(&file, &config)?;
                Some(ChildGuard::spawn(run.arg("-db").arg("-f").arg(&file))?.ended_gently())
            }
            Some(_) => Some(nginx(&mut run, dir.path(), "proxy", &config)?),
        };
        let proxy = proxy.map(|p| when_ready(p, |_| lab.forwarder.wait_listening(PORT, PATIENCE))).transpose()?;
        Ok(Site { variant, _proxy: proxy, _origin: origin, _pins: pins, lab, dir })
    }

    /// Path of longsplice's control socket.
    pub fn control(&self) -> PathBuf {
        control_socket(self.dir.path())
    }

    /// Path of a file that longsplice writes under this name.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The address that this client connects to.
    pub fn address(&self, client: usize) -> SocketAddr {
        if self.variant.routed() { servers()[client % 2] } else { proxy() }
    }
}

/// The origin's addresses.
pub fn servers() -> [SocketAddr; 2] {
    [topology::SERVER, topology::SERVER_SECOND].map(|s| s.port(Family::V4, PORT))
}

fn nginx(run: &mut std::process::Command, dir: &Path, name: &str, config: &str) -> Result<ChildGuard> {
    let file = dir.join(format!("{name}.conf"));
    fs::write(&file, config)?;
    let pid = format!("pid {};", dir.join(format!("{name}.pid")).display());
    run.args(["-e", "stderr", "-p"]).arg(dir).arg("-c").arg(&file).arg("-g").arg(pid);
    Ok(ChildGuard::spawn(run)?.ended_gently())
}

/// The configuration of the server's nginx.
pub fn origin_config(root: &Path, dir: &Path) -> String {
    let [a, b] = servers();
    format!(
        "{NGINX}  sendfile on;\n  tcp_nopush on;\n  open_file_cache max=64;\n  keepalive_requests 1000000000;\n  \
         keepalive_timeout 3600s;\n  client_body_temp_path {dir}/body;\n  proxy_temp_path {dir}/proxy;\n  \
         server {{ listen {a}; listen {b}; root {root}; }}\n}}\n",
        dir = dir.display(),
        root = root.display()
    )
}

const NGINX: &str = "worker_processes auto;\nworker_rlimit_nofile 16384;\nuser root;\ndaemon off;\nerror_log stderr error;\n\
                     events { worker_connections 4096; }\nhttp {\n  access_log off;\n";

/// The configuration of a proxy; empty for IP forwarding.
pub fn config(variant: Variant) -> String {
    let (own, [a, b]) = (proxy(), servers());
    match variant.peer() {
        None if variant.routed() => String::new(),
        None => format!(
            "[[listener]]\nprotocol = \"http\"\nlisten = \"{own}\"\nroute = [{{ pool = \"web\" }}]\n[pool.web]\nservers = \
             [\"{a}\", \"{b}\"]\n"
        ),
        Some(Peer::Haproxy) => format!(
            "global\n  maxconn 4096\ndefaults\n  mode http\n  option splice-auto\n  http-reuse always\n  timeout connect 5s\n  \
             timeout client 60s\n  timeout server 60s\nlisten bench\n  bind {own}\n  server a {a}\n  server b {b}\n"
        ),
        Some(_) => format!(
            "{NGINX}  keepalive_requests 1000000000;\n  proxy_max_temp_file_size 0;\n  upstream web {{ server {a}; server {b}; \
             keepalive 64; keepalive_requests 1000000000; }}\n  server {{ listen {own}; location / {{ proxy_pass \
             http://web; proxy_http_version 1.1; proxy_set_header Connection \"\"; }} }}\n}}\n"
        ),
    }
}
