//! A lab whose forwarder runs the program with a configuration.

use super::{LONGSPLICE, Pins, Running, connect, echo};
use longsplice_lab::{Lab, Shape};
use std::{
    fs,
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
};
use tempfile::TempDir;

pub const AT_ONCE: &str = "policy = { splice = \"at-once\" }";

/// The lab, and the directory of the configuration. Programs that run in it are dropped first.
pub struct Setting {
    pub lab: Lab,
    /// Of the forwarder: those of connections, and of translucent proxying; and those of a client's host that asks for proxies.
    pub pins: [Pins; 3],
    pub dir: TempDir,
}

impl Setting {
    /// Client, forwarder and server, and this configuration.
    pub fn new(configuration: &str) -> Setting {
        Setting::at(Lab::simple(Shape::TwoDevices).unwrap(), configuration)
    }

    pub fn at(lab: Lab, configuration: &str) -> Setting {
        let pins = [Pins::of(&lab.forwarder), Pins::of_tpot(&lab.forwarder), Pins::of_tpot(&lab.client)];
        let setting = Setting { lab, pins, dir: tempfile::tempdir().unwrap() };
        setting.configure(configuration);
        setting
    }

    /// Replaces the configuration, for the next start.
    pub fn configure(&self, configuration: &str) {
        fs::write(self.file(), configuration).unwrap();
    }

    fn file(&self) -> String {
        self.dir.path().join("longsplice.toml").to_str().unwrap().into()
    }

    /// Starts the program with the configuration.
    pub fn start(&self) -> Running {
        self.start_with(&[])
    }

    /// Starts the program with the configuration and these flags.
    pub fn start_with(&self, more: &[&str]) -> Running {
        self.start_by(self.lab.forwarder.command(LONGSPLICE), more)
    }

    /// Like `start_with`, by any command that executes the program.
    pub fn start_by(&self, command: Command, more: &[&str]) -> Running {
        Running::start(command, None, &["--config", &self.file()], more)
    }

    /// Runs the program, which must not start. Returns its messages.
    pub fn refused(&self) -> String {
        let control = self.dir.path().join("control.sock");
        let mut run = self.lab.forwarder.command(LONGSPLICE);
        let out = run.args(["run", "--config", &self.file(), "--control"]).arg(control).output().unwrap();
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success(), "{said}");
        said
    }

    /// Listens at the server.
    pub fn listen(&self, at: SocketAddr) -> TcpListener {
        self.lab.server.run(|| TcpListener::bind(at)).unwrap()
    }

    /// Echoes the data of connections to an address of the server.
    pub fn echo(&self, at: SocketAddr) {
        echo(self.listen(at));
    }

    /// Connects from the client's host.
    pub fn connect(&self, at: SocketAddr) -> TcpStream {
        self.lab.client.run(|| connect(at))
    }
}

/// A listener of a configuration. `more`: its further keys, a line each.
pub fn listener(protocol: &str, at: &str, more: &str) -> String {
    format!("[[listener]]\nprotocol = \"{protocol}\"\nlisten = \"{at}\"\n{more}\n")
}
