//! `longsplice-bench demo ftp`: a download by FTP. The proxy reads the control connection, and splices the data connection before
//! its first byte. It is killed in the middle; the data go on.

use super::{
    Story, again, short,
    stage::{Download, Result, Stage, make_file},
};
use crate::bench::{
    variant::Variant,
    venue::{OURS, Venue},
};
use longsplice_lab::{Family, Lab, Shape, topology, trace::Tap};
use std::{
    fs::{self, Permissions},
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::Path,
    time::Duration,
};

/// File size, and the bytes per second that vsftpd sends: the download takes eight seconds.
const SIZE: u64 = 256 << 20;
const RATE: u64 = 32 << 20;
/// Port of the server and of the proxy.
const PORT: u16 = 21;
const VSFTPD: &str = "/usr/sbin/vsftpd";
const LOOK: Duration = Duration::from_millis(20);
/// How long its segments are captured after the kill.
const AFTER: Duration = Duration::from_millis(300);

/// Runs the demo.
pub fn tell(story: &Story, out: &Path) -> Result<()> {
    if !Path::new(VSFTPD).exists() {
        return Err("vsftpd is not installed: apt-get install vsftpd".into());
    }
    fs::create_dir_all(out).map_err(|e| format!("{}: {e}", out.display()))?;
    println!("client 10.77.1.2 ──── longsplice ──── server 10.77.2.2   (three network namespaces)\n");
    println!("making a file of {} and its SHA-256 ...", longsplice::bytes(SIZE));
    let mut stage = set()?;
    let process = stage.program()?.pid();
    let at = |address: topology::Address| address.port(Family::V4, PORT);
    let (proxy, server) = (at(topology::FORWARDER_TO_CLIENT), at(topology::SERVER));
    story.say(&format!(
        "vsftpd serves {} at {}/s, SHA-256 {}",
        longsplice::bytes(SIZE),
        longsplice::bytes(RATE),
        short(&stage.ends)
    ));
    story.say(&format!("longsplice run --config FILE: ftp at {proxy}, for {server}   (process {process})"));
    let taps = (Tap::start(&stage.lab.server, "s0")?, Tap::start(&stage.lab.client, "c0")?);
    let mut control = stage.control(OURS)?;
    let mut download = Download::start(&stage.lab, &[&format!("ftp://{proxy}/file")])?;
    story.say(&format!("curl ftp://{proxy}/file | sha256sum"));
    let row = story.wait("the data connection", LOOK, || {
        let rows = longsplice::flows(&mut control)?;
        if let Some(why) = rows.iter().find_map(|row| row.refusal.as_ref()) {
            return Err(format!("it was not spliced: {why}").into());
        }
        Ok(rows.into_iter().find(|row| row.state == "spliced" && row.bytes_down > 0))
    })?;
    story.say(&format!("a data connection, from {} to {}, spliced before its first byte", row.client, row.server));
    story.say(&format!("             segments pass: {}", row.stages.join(" > ")));
    let switch = story.kill(&mut stage, &download, control)?;
    let killed = story.mark(&stage, &download);
    story.pause(AFTER)?;
    story.say(&format!("the kill, and what came after it: {}", again(&killed, &story.mark(&stage, &download))));
    let traces = (taps.0.stop()?, taps.1.stop()?);
    let status = story.wait_end(&stage, &mut download, &killed)?;
    story.say(&format!("curl misses the server's last reply, which nobody passes on any more: {status}"));
    // the client has opened its end, to an address that only the proxy's reply has named
    let client: SocketAddr = row.client.parse()?;
    let hello = traces.1.packets.iter().find(|p| p.from == client && p.flags.syn());
    let ends = [row.server.parse()?, hello.ok_or("the trace has no data connection")?.to];
    story.draw(&traces, ends, switch, ["ftp.svg", "its proxy is killed", "kill, which takes as long"], out)?;
    stage.ask(&stage.lab.forwarder, OURS, &["stop", "--flush"]).map(drop).or_else(|_| {
        // there is no process: the next one takes over what is left
        let (at, config) = (stage.lab.forwarder.clone(), config());
        stage.longsplice(&at, "next", &config, &[])?;
        stage.ask(&at, "next", &["stop", "--flush"]).map(drop)
    })?;
    story.say("longsplice stop --flush   nothing is left in the kernel");
    Ok(())
}

/// One server for everybody.
fn config() -> String {
    format!(
        "[[listener]]\nprotocol = \"ftp\"\nlisten = \"{}\"\ntarget = \"{}\"\npolicy = {{ path = \"any\" }}\n",
        topology::FORWARDER_TO_CLIENT.port(Family::V4, PORT),
        topology::SERVER.port(Family::V4, PORT)
    )
}

/// Sets the stage: three hosts, vsftpd with a file, and the proxy.
fn set() -> Result<Stage> {
    let mut venue = Venue::new(Variant::Default, Lab::simple(Shape::TwoDevices)?)?;
    let (root, empty, file) = (venue.path("root"), venue.path("empty"), venue.path("vsftpd.conf"));
    // vsftpd does not run as root for its clients
    for dir in [&venue.path(""), &root, &empty] {
        fs::create_dir_all(dir)?;
        fs::set_permissions(dir, Permissions::from_mode(0o755))?;
    }
    let digest = make_file(&root.join("file"), SIZE)?;
    let text = format!(
        "listen=YES\nlisten_port={PORT}\nbackground=NO\nanonymous_enable=YES\nno_anon_password=YES\nanon_root={}\n\
         secure_chroot_dir={}\nanon_max_rate={RATE}\nseccomp_sandbox=NO\nisolate=NO\nisolate_network=NO\n\
         connect_from_port_20=NO\n",
        root.display(),
        empty.display()
    );
    fs::write(&file, text)?;
    let (server, forwarder) = (venue.lab.server.clone(), venue.lab.forwarder.clone());
    venue.serve(&server, server.command(VSFTPD).arg(&file), PORT)?;
    venue.longsplice(&forwarder, OURS, &config(), &[])?;
    Ok(venue.with(digest))
}
