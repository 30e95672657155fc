//! Proxies by others, and nft: where they are, and how they are configured, as their documentation advises.

use super::network::{PORT, proxy, server};
use longsplice_lab::topology;
use std::{net::SocketAddr, path::Path, process::Command};

/// Debian's path of nginx's stream module; other builds include the module.
const STREAM_MODULE: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

/// A program by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// HAProxy.
    Haproxy,
    /// nginx.
    Nginx,
    /// socat.
    Socat,
    /// Dante.
    Dante,
    /// nft, which configures packet filtering and address translation in the kernel.
    Nft,
}

impl Peer {
    /// All peers.
    pub const ALL: [Peer; 5] = [Peer::Haproxy, Peer::Nginx, Peer::Socat, Peer::Dante, Peer::Nft];

    /// The name as its authors write it; Debian's path of the program, which is not in every user's PATH; Debian's packages.
    fn about(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Peer::Haproxy => ("HAProxy", "/usr/sbin/haproxy", "haproxy"),
            Peer::Nginx => ("nginx", "/usr/sbin/nginx", "nginx-light libnginx-mod-stream"),
            Peer::Socat => ("socat", "/usr/bin/socat", "socat"),
            Peer::Dante => ("Dante", "/usr/sbin/danted", "dante-server"),
            Peer::Nft => ("nftables", "/usr/sbin/nft", "nftables"),
        }
    }

    /// The name as its authors write it.
    pub fn name(self) -> &'static str {
        self.about().0
    }

    /// Path of the program.
    pub fn program(self) -> &'static str {
        self.about().1
    }

    /// Debian's packages.
    pub fn packages(self) -> &'static str {
        self.about().2
    }

    /// The program's version line; `None` if it is not installed.
    pub fn version(self) -> Option<String> {
        let argument = if self == Peer::Socat { "-V" } else { "-v" };
        let output = Command::new(self.program()).arg(argument).output().ok()?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        // socat prints its author first.
        let line = said.lines().find(|l| l.contains("version") || l.contains(" v"))?;
        Some(line.trim().to_owned())
    }

    /// Whether it is installed.
    pub fn installed(self) -> bool {
        let stream =
            self != Peer::Nginx || Path::new(STREAM_MODULE).exists() || !Path::new("/etc/debian_version").exists();
        Path::new(self.program()).exists() && stream
    }

    /// Settings of this machine for nginx, with the file of its process ID.
    pub fn nginx_globals(pid: &Path) -> String {
        let module =
            if Path::new(STREAM_MODULE).exists() { format!("load_module {STREAM_MODULE};") } else { String::new() };
        format!("{module} pid {};", pid.display())
    }

    /// Its configuration, or its command line.
    pub fn config(self) -> Option<String> {
        let (own, target) = (proxy(), server());
        Some(match self {
            Peer::Haproxy => haproxy(&[("tcp", own, &[target])]),
            Peer::Nginx => format!(
                "worker_processes auto;\nworker_rlimit_nofile 16384;\nuser root;\ndaemon off;\nerror_log stderr error;\n\
                 events {{ worker_connections 8192; }}\nstream {{ server {{ listen {own}; proxy_pass {target}; }} }}\n"
            ),
            Peer::Socat => {
                let listen = format!("TCP-LISTEN:{PORT},bind={},reuseaddr,backlog=1024,fork", own.ip());
                format!("socat {listen} TCP:{target}\n")
            }
            Peer::Dante => format!(
                "errorlog: stderr\ninternal: {} port = {PORT}\nexternal: {}\nclientmethod: none\nsocksmethod: none\n\
                 user.privileged: root\nuser.unprivileged: nobody\nclient pass {{ from: 0/0 to: 0/0 }}\n\
                 socks pass {{ from: 0/0 to: 0/0 }}\n",
                own.ip(),
                topology::FORWARDER_TO_SERVER.v4
            ),
            Peer::Nft => return None,
        })
    }
}

/// The configuration of HAProxy: listeners with their modes, addresses and servers.
pub fn haproxy(listeners: &[(&str, SocketAddr, &[SocketAddr])]) -> String {
    let mut text =
        "global\n  maxconn 4096\ndefaults\n  option splice-auto\n  http-reuse always\n  timeout connect 5s\n  \
                    timeout client 60s\n  timeout server 60s\n"
            .to_owned();
    for (n, (mode, own, servers)) in listeners.iter().enumerate() {
        text += &format!("listen bench{n}\n  mode {mode}\n  bind {own}\n");
        servers.iter().enumerate().for_each(|(n, server)| text += &format!("  server server{n} {server}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_but_nft_has_a_configuration() {
        for peer in Peer::ALL {
            let config = peer.config();
            assert_eq!(config.is_none(), peer == Peer::Nft, "{}", peer.name());
            assert!(config.is_none_or(|c| c.contains("7000")), "{}", peer.name());
        }
    }
}
