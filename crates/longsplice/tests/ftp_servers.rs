//! The FTP servers that tests run. Debian packages: vsftpd, python3-pyftpdlib; proftpd-core and pure-ftpd, which cannot be installed
//! beside vsftpd: `dist/install-deps test` unpacks them.

use longsplice_lab::Namespace;
use std::{fs, path::Path, process::Command};

/// Where `dist/install-deps` unpacks packages.
const UNPACKED: &str = "/usr/local/lib/longsplice-tests";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    Vsftpd,
    Pyftpdlib,
    Proftpd,
    PureFtpd,
}

impl Server {
    pub const ALL: [Server; 4] = [Server::Vsftpd, Server::Pyftpdlib, Server::Proftpd, Server::PureFtpd];

    /// Prepares the command that runs it on a host, for anonymous users of `dir`/root, who may write to up. It listens on both
    /// families.
    pub fn command(self, host: &Namespace, port: u16, dir: &Path) -> Command {
        let root = dir.join("root");
        match self {
            Server::Vsftpd => {
                let text = format!(
                    "listen=NO\nlisten_ipv6=YES\nlisten_port={port}\nbackground=NO\nanonymous_enable=YES\nno_anon_password=YES\n\
                     write_enable=YES\nanon_upload_enable=YES\nanon_mkdir_write_enable=YES\nanon_other_write_enable=YES\n\
                     anon_umask=022\nanon_root={}\nsecure_chroot_dir={}\nseccomp_sandbox=NO\nisolate=NO\n\
                     isolate_network=NO\nasync_abor_enable=YES\nascii_download_enable=YES\nconnect_from_port_20=NO\n",
                    root.display(),
                    dir.join("empty").display(),
                );
                let config = dir.join("vsftpd.conf");
                fs::write(&config, text).unwrap();
                let mut command = host.command("/usr/sbin/vsftpd");
                command.arg(config);
                command
            }
            Server::Pyftpdlib => {
                let mut command = host.command("/usr/bin/python3");
                command.args(["-c", PYFTPDLIB]).arg(root).arg(port.to_string());
                command
            }
            Server::Proftpd => {
                let config = dir.join("proftpd.conf");
                let text = PROFTPD.replace("PORT", &port.to_string()).replace("DIR", dir.to_str().unwrap());
                let text = text.replace("MODULES", &unpacked("proftpd-core/usr/lib/proftpd"));
                fs::write(&config, text).unwrap();
                let mut command = host.command(&unpacked("proftpd-core/usr/sbin/proftpd"));
                command.args(["--nodaemon", "--quiet", "--config"]).arg(config);
                command
            }
            Server::PureFtpd => {
                // Its anonymous users have the home of the user ftp. Here that is our directory.
                let mut command = host.command("unshare");
                let script = "mount --bind \"$1\" \"$(getent passwd ftp | cut -d: -f6)\" && shift && exec \"$@\"";
                command.args(["--mount", "sh", "-ec", script, "sh"]).arg(root);
                command.arg(unpacked("pure-ftpd/usr/sbin/pure-ftpd")).args([
                    "--bind",
                    &format!(",{port}"),
                    "--pidfile",
                ]);
                command.arg(dir.join("pure-ftpd.pid")).args(["--anonymousonly", "--anonymouscancreatedirs"]);
                command.args([
                    "--keepallfiles",
                    "--dontresolve",
                    "--maxclientsnumber",
                    "100",
                    "--maxclientsperip",
                    "100",
                ]);
                command.args(["--limitrecursion", "5000:2"]);
                command
            }
        }
    }
}

fn unpacked(path: &str) -> String {
    let path = format!("{UNPACKED}/{path}");
    assert!(Path::new(&path).exists(), "{path} is missing: run dist/install-deps test");
    path
}

const PYFTPDLIB: &str = "
import sys
from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer
who = DummyAuthorizer()
who.add_anonymous(sys.argv[1], perm='elradfmwMT')
FTPHandler.authorizer = who
FTPServer(('::', int(sys.argv[2])), FTPHandler).serve_forever()
";

const PROFTPD: &str = "
ServerType standalone
DefaultServer on
DefaultAddress 127.0.0.1
UseIPv6 on
UseReverseDNS off
Port PORT
User nobody
Group nogroup
PidFile DIR/proftpd.pid
ScoreboardFile DIR/proftpd.scoreboard
SystemLog none
TransferLog none
WtmpLog off
ControlsEngine off
DelayEngine off
AuthOrder mod_auth_unix.c
ModulePath MODULES
LoadModule mod_deflate.c
DeflateEngine on
AllowOverwrite on
AllowStoreRestart on
# otherwise it hears ABOR when all is sent
UseSendfile off
<Anonymous DIR/root>
  User ftp
  Group nogroup
  UserAlias anonymous ftp
  RequireValidShell off
</Anonymous>
";
