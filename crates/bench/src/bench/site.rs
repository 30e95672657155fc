//! Reverse proxies in front of two addresses of one nginx, which serves files: the origin is the same for all.

use super::{
    Result,
    network::{PORT, Packets, lab, proxy},
    peers::{Peer, haproxy},
    variant::Variant,
    venue::{OURS, Venue},
};
use longsplice_lab::{Family, pattern, topology};
use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    net::SocketAddr,
    path::Path,
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

/// A lab with an origin of two addresses, and a variant in the middle.
pub type Site = Venue<Origin>;

/// The origin is a program of the venue.
pub struct Origin;

impl Site {
    /// Sets up a site. `arguments`: further arguments of longsplice.
    pub fn set(variant: Variant, arguments: &[&str], files: &Files) -> Result<Site> {
        let mut venue = Venue::new(variant, lab(Packets::Large, variant.routed())?)?;
        let (server, forwarder) = (venue.lab.server.clone(), venue.lab.forwarder.clone());
        let origin = origin_config(files.0.path(), &venue.path(""));
        venue.peer(&server, Peer::Nginx, "origin", &origin, PORT)?;
        let config = config(variant);
        match variant.peer() {
            None if variant.routed() => {}
            None => venue.longsplice(&forwarder, OURS, &config, arguments)?,
            Some(peer) => venue.peer(&forwarder, peer, "proxy", &config, PORT)?,
        }
        Ok(venue.with(Origin))
    }

    /// The contents of a file that longsplice writes under this name.
    pub fn read(&self, name: &str) -> Result<String> {
        Ok(fs::read_to_string(self.path(OURS).join(name))?)
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
        Some(Peer::Haproxy) => haproxy(&[("http", own, &[a, b])]),
        Some(_) => format!(
            "{NGINX}  keepalive_requests 1000000000;\n  proxy_max_temp_file_size 0;\n  upstream web {{ server {a}; server {b}; \
             keepalive 64; keepalive_requests 1000000000; }}\n  server {{ listen {own}; location / {{ proxy_pass \
             http://web; proxy_http_version 1.1; proxy_set_header Connection \"\"; }} }}\n}}\n"
        ),
    }
}
