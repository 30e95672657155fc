//! `longsplice-bench demo`: one download, with a commentary. [`stage`] sets it up, this module tells the story, and [`crate::plot`]
//! draws the switch. `longsplice-bench demo ftp` shows one of FTP instead ([`ftp`]), `demo http` many requests ([`http`]), and
//! `demo tpot` a chain of translucent proxies ([`tpot`]).

mod ftp;
mod http;
mod stage;
mod tpot;

use crate::{
    args::{DemoArgs, Show},
    bench::venue::OURS,
    plot::{self, Leg, Switch, now},
    watch_interrupts,
};
use longsplice::{Client, Outcome, Row};
use longsplice_lab::{
    Family, topology,
    trace::{Tap, Trace},
};
use stage::{Download, HTTP, RATE, Result, SIZE, SOCKS, Stage};
use std::{
    fs,
    io::{self, Write},
    net::SocketAddr,
    path::Path,
    process::{ExitCode, ExitStatus},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// Bytes copied before the switch: three seconds of control mode, for comparison.
const THRESHOLD: u64 = 3 * RATE;
/// Time spliced with the proxy alive, to show that it does nothing.
const WATCHED: Duration = Duration::from_secs(3);
/// Time limit. The whole download takes 16 s; a machine under load may be slower.
const PATIENCE: Duration = Duration::from_secs(90);

/// `longsplice-bench demo`.
pub fn demo(args: &DemoArgs) -> Outcome {
    let story = Story { began: Instant::now(), interrupted: watch_interrupts()? };
    let tell = match args.what {
        Show::Download => tell,
        Show::Ftp => ftp::tell,
        Show::Http => http::tell,
        Show::Tpot => tpot::tell,
    };
    tell(&story, &args.out).map(|()| ExitCode::SUCCESS)
}

/// Runs the demo of a download.
fn tell(story: &Story, out: &Path) -> Result<()> {
    fs::create_dir_all(out).map_err(|e| format!("{}: {e}", out.display()))?;
    println!("client 10.77.1.2 ──── longsplice ──── server 10.77.2.2   (three network namespaces)\n");
    println!("making a file of {} and its SHA-256 ...", longsplice::bytes(SIZE));
    let mut stage = Stage::set(THRESHOLD)?;
    let story = Story { began: Instant::now(), interrupted: story.interrupted.clone() };
    story.tell(&mut stage, out).map_err(|e| format!("{e}{}", stage.last_words()).into())
}

/// Processor time, bytes, and segments that the server has sent again, at one moment.
struct Mark {
    at: Instant,
    cpu: Option<f64>,
    received: u64,
    retransmitted: u64,
}

/// Time shown in the plot before and after the switch.
const AROUND: Duration = Duration::from_millis(60);

struct Story {
    began: Instant,
    interrupted: Arc<AtomicBool>,
}

impl Story {
    fn say(&self, text: &str) {
        // If nobody reads it any more, nobody waits for the end.
        if writeln!(io::stdout(), "{:5.1} s  {text}", self.began.elapsed().as_secs_f64()).is_err() {
            self.interrupted.store(true, Relaxed);
        }
    }

    /// Calls `look` every `step` until it returns a value.
    fn wait<T>(&self, what: &str, step: Duration, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            if self.interrupted.load(Relaxed) {
                return Err("interrupted".into());
            }
            if Instant::now() > end {
                return Err(format!("{what} did not happen within {} s", PATIENCE.as_secs()).into());
            }
            thread::sleep(step);
        }
    }

    fn pause(&self, length: Duration) -> Result<()> {
        let end = Instant::now() + length;
        self.wait("the end of a pause", Duration::from_millis(20), || Ok((Instant::now() >= end).then_some(())))
    }

    fn tell(&self, stage: &mut Stage, out: &Path) -> Result<()> {
        self.say(&format!(
            "nginx serves {} at {}/s, SHA-256 {}",
            longsplice::bytes(SIZE),
            longsplice::bytes(RATE),
            short(&stage.ends)
        ));
        let process = stage.program()?.pid();
        self.say(&format!(
            "longsplice run --socks5 {} --splice {THRESHOLD}   (process {process})",
            stage::proxy_address(),
        ));
        let taps = (Tap::start(&stage.lab.server, "s0")?, Tap::start(&stage.lab.client, "c0")?);
        let mut client = stage.control(OURS)?;
        let mut download = Download::start(&stage.lab, &["--socks5-hostname", &stage::proxy_address(), &stage::url()])?;
        self.say(&format!("curl --socks5-hostname {} {} | sha256sum", stage::proxy_address(), stage::url()));

        let (switch, frozen) = self.watch_switch(stage, &mut client, &download)?;
        self.pause(Duration::from_millis(500))?;
        self.say(&format!("the switch, and half a second after it: {}", again(&frozen, &self.mark(stage, &download))));
        let traces = (taps.0.stop()?, taps.1.stop()?);
        self.kill(stage, &download, client)?;
        let killed = self.mark(stage, &download);
        let ends = [topology::SERVER.port(Family::V4, HTTP), topology::FORWARDER_TO_CLIENT.port(Family::V4, SOCKS)];
        self.wait_end(stage, &mut download, &killed)?;
        let what = ["switch.svg", "it is spliced", "switch, from copying to spliced"];
        self.draw(&traces, ends, switch, what, out)?;
        stage.ask(&stage.lab.forwarder, OURS, &["stop", "--flush"])?;
        self.say("longsplice stop --flush   nothing is left in the kernel");
        Ok(())
    }

    /// Watches a spliced download, and kills the proxy. Returns when.
    fn kill(&self, stage: &mut Stage, download: &Download, control: Client) -> Result<Switch> {
        let spliced = self.mark(stage, download);
        self.pause(WATCHED)?;
        self.compare("spliced", &spliced, &self.mark(stage, download));
        drop(control);
        let (process, began) = (stage.program()?.pid(), now());
        stage.program()?.kill();
        let switch = Switch { began, done: now(), around: AROUND };
        let received = longsplice::bytes(download.received());
        self.say(&format!("kill -9 {process}   the proxy is gone, {received} have arrived"));
        Ok(switch)
    }

    /// Waits for the end of a download since the kill, and compares it with what was served. Returns what curl thinks of it.
    fn wait_end(&self, stage: &Stage, download: &mut Download, killed: &Mark) -> Result<ExitStatus> {
        self.wait("the end of the download", Duration::from_millis(20), || Ok(download.ended().then_some(())))?;
        self.compare("without it", killed, &self.mark(stage, download));
        let received = longsplice::bytes(download.received());
        let (digest, status) = download.outcome()?;
        let served = &stage.ends;
        if digest != *served {
            return Err(format!("{received} arrived, but with SHA-256 {digest}, not {served}; curl: {status}").into());
        }
        self.say(&format!("complete: {received}, SHA-256 {} as served", short(&digest)));
        Ok(status)
    }

    /// Watches the flow until it is spliced. Returns the last mark before the switch as well.
    fn watch_switch(&self, stage: &Stage, client: &mut Client, download: &Download) -> Result<(Switch, Mark)> {
        let flow = |client: &mut Client| -> Result<Option<Row>> { Ok(longsplice::flows(client)?.pop()) };
        let step = Duration::from_millis(5);
        let row = self.wait("the flow", step, || Ok(flow(client)?.filter(|r| r.bytes_down > 0)))?;
        let copying = self.mark(stage, download);
        let stages = row.stages.join(" > ");
        let mut began = now();
        let mut before = self.mark(stage, download);
        let (row, done) = self.wait("the switch", step, || {
            if download.ended() {
                return Err("the download ended too early".into());
            }
            match flow(client)? {
                Some(Row { refusal: Some(why), .. }) => Err(format!("the flow was not spliced: {why}").into()),
                Some(row) if row.state == "spliced" => Ok(Some((row, now()))),
                Some(row) => {
                    if row.state == "copying" {
                        began = now();
                        before = self.mark(stage, download);
                    }
                    Ok(None)
                }
                None => Err("the flow is gone".into()),
            }
        })?;
        self.compare("copying", &copying, &before);
        self.say(&format!("             segments pass: {stages}"));
        self.say(&format!(
            "spliced after {} in {:.0} ms at most (two looks at `longsplice ls`)",
            longsplice::bytes(before.received),
            (done - began).as_secs_f64() * 1000.0
        ));
        self.say(&format!("             segments pass: {}", row.stages.join(" > ")));
        Ok((Switch { began, done, around: AROUND }, before))
    }

    fn mark(&self, stage: &Stage, download: &Download) -> Mark {
        let retransmitted = stage.retransmitted();
        Mark { at: Instant::now(), cpu: stage.cpu(), received: download.received(), retransmitted }
    }

    fn compare(&self, name: &str, from: &Mark, to: &Mark) {
        let seconds = (to.at - from.at).as_secs_f64().max(0.001);
        let rate = longsplice::bytes(((to.received - from.received) as f64 / seconds) as u64);
        let cpu = match (from.cpu, to.cpu) {
            (Some(from), Some(to)) => {
                format!(", the proxy takes {:.1} % of a processor", (to - from) / seconds * 100.0)
            }
            _ => String::new(),
        };
        self.say(&format!("{name:<11}  {rate}/s{cpu}; {}", again(from, to)));
    }

    /// Draws what server and proxy, which are the ends of their connections, sent around a switch. `what`: the name of the file,
    /// what happened to the download, and the label of the time it took.
    fn draw(
        &self,
        traces: &(Trace, Trace),
        ends: [SocketAddr; 2],
        switch: Switch,
        [name, what, band]: [&str; 3],
        out: &Path,
    ) -> Result<()> {
        let missing = "the trace has no connection";
        let server = Leg::new(&traces.0, ends[0], switch).ok_or(missing)?;
        let client = Leg::new(&traces.1, ends[1], switch).ok_or(missing)?;
        let file = out.join(name);
        plot::draw(&file, [what, band], &server, &client, switch)?;
        self.say(&format!(
            "around the {} {} segments came twice, the longest pause was {:.0} ms: see {}",
            band.split(',').next().unwrap_or(band),
            client.again,
            client.longest_pause(),
            file.display()
        ));
        Ok(())
    }
}

fn again(from: &Mark, to: &Mark) -> String {
    format!("segments sent again by the server: {}", to.retransmitted - from.retransmitted)
}

fn short(digest: &str) -> String {
    format!("{}...", &digest[..16])
}
