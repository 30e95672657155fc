//! Commands that move data.

use super::{
    Hear, Heard, Next, Session,
    data::{self, Doors, Line},
    line::Command,
    replies::Progress,
};
use crate::fault::{Fault, Step};
use longsplice_engine::{Leg, LegOfProxy};
use std::{
    io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// Data connections of a session that may still be closing when another one begins.
const CLOSING_MAX: usize = 8;
/// Time for the second of the two replies to an ABOR (RFC 959, 4.1.3). Some servers send one.
const SECOND_REPLY: Duration = Duration::from_secs(5);

/// Time within which a server replies to a command and the ABOR that breaks it off: some round trips of a slow way. Servers do not
/// hear ABOR while they wait for data or for room to send, or want it with the signs of Telnet (vsftpd) or without (pure-ftpd), or
/// wait for the end of the data connection before they reply to it (proftpd). All of them notice if that is reset.
const BROKEN_OFF_WITHIN: Duration = Duration::from_secs(2);

/// A transfer whose command the server has.
struct Transfer {
    line: Arc<Line>,
    /// Number of its flow, once both data connections are there.
    flow: Option<u64>,
    /// The client's data connection, as long as the server's is awaited.
    waiting: Option<Leg>,
    doors: Doors,
    /// The server has said that it begins.
    has_begun: bool,
    /// The server has said how it ended.
    is_over: bool,
    /// Replies to come: to the command, and to those that were sent meanwhile.
    replies: usize,
    /// Of these, those to STAT. They may come before that to the transfer.
    questions: usize,
    /// The client has broken it off: when its data connections are reset.
    reset_at: Option<Instant>,
}

/// Whether this is a reply to a command whose transfer has failed. Some servers reply to ABOR before they do so to that command; they
/// refuse ABOR by 5xx with a zero in the middle.
fn is_failure(code: u16) -> bool {
    code >= 400 && !(500..510).contains(&code)
}

impl Session<'_> {
    /// Makes the data connections, passes the command on, and replies until all is said.
    pub(super) async fn transfer(&mut self, command: &Command) -> Result<(), Next> {
        let (plan, mut doors) = (self.state.plan.take(), std::mem::take(&mut self.doors));
        let Some(plan) = plan else { return self.tell(425, "Use PASV, EPSV, PORT or EPRT first").await };
        self.transfers.retain(|line| line.strong_count() > 0);
        if self.transfers.len() >= CLOSING_MAX {
            return self.tell(425, "Earlier data connections are still open").await;
        }
        let limit = self.front.listener.limits.connect;
        let made = timeout(limit, data::make(self, plan, &doors)).await;
        let (client, server) =
            match made.map_err(|_| Fault::Timeout(Step::Connect)).and_then(|made| made.map_err(Fault::Unreachable)) {
                Ok(legs) => legs,
                Err(fault) => {
                    self.log_refused(command, &fault);
                    return self.tell(425, &format!("No data connection: {fault}")).await;
                }
            };
        doors.client = None; // it was open for one connection
        let line = Line::new(self.live.clone(), self.record_of(command));
        self.transfers.push(Arc::downgrade(&line));
        let (flow, waiting) = match server {
            Some(server) => (Some(data::join(self, client, server, &line).await), None),
            None => (None, Some(client)),
        };
        let mut transfer = Transfer {
            line,
            flow,
            waiting,
            doors,
            has_begun: false,
            is_over: false,
            replies: 1,
            questions: 0,
            reset_at: None,
        };
        let done = match self.send(command).await {
            Ok(()) => self.replies(&mut transfer).await,
            Err(next) => Err(next),
        };
        if let Some(leg) = transfer.waiting {
            self.live.shared.splicer.discard(leg);
        }
        done
    }

    async fn replies(&mut self, transfer: &mut Transfer) -> Result<(), Next> {
        let (mut progress, mut hear) = (Progress::default(), Hear::Meanwhile);
        while transfer.replies > 0 {
            let late = match transfer.reset_at {
                Some(at) => at.saturating_duration_since(Instant::now()),
                None if transfer.is_over => SECOND_REPLY,
                None => self.front.listener.limits.reply,
            };
            let door = transfer.doors.server.as_ref().filter(|_| transfer.waiting.is_some());
            match self.hear(hear, progress.within(), late, door).await? {
                Heard::Data(Ok(server)) => self.join(transfer, server).await,
                Heard::Data(Err(error)) => self.give_up(transfer, &error),
                Heard::Reply(line) => {
                    if let Some(code) = self.note(&mut progress, &line).await? {
                        self.judge_reply(transfer, code).await;
                    }
                    self.pass_line(&line).await?;
                }
                Heard::Command(command) => self.pass_meanwhile(transfer, &command).await?,
                Heard::Waiting => hear = Hear::None,
                Heard::Nothing if transfer.reset_at.is_some() => self.break_off(transfer),
                Heard::Nothing if transfer.is_over => return Ok(()),
                // data may take as long as they like
                Heard::Nothing if Arc::strong_count(&transfer.line) > 1 => {}
                Heard::Nothing => return Err(self.late().await),
                Heard::Stop => {}
            }
        }
        Ok(())
    }

    async fn join(&self, transfer: &mut Transfer, server: Leg) {
        transfer.doors.server = None;
        if let Some(client) = transfer.waiting.take() {
            transfer.flow = Some(data::join(self, client, server, &transfer.line).await);
        }
    }

    fn give_up(&self, transfer: &mut Transfer, error: &io::Error) {
        tracing::debug!(%error, "a server's data connection cannot be accepted: the transfer has none");
        transfer.waiting.take().into_iter().for_each(|leg| self.live.shared.splicer.discard(leg));
    }

    /// Resets the data connections of a transfer that the client has broken off. The server may not have made its own yet.
    fn break_off(&self, transfer: &mut Transfer) {
        transfer.reset_at = None;
        transfer.doors.server = None;
        if let Some(leg) = transfer.waiting.take() {
            leg.reset_at_close();
            self.live.shared.splicer.discard(leg);
        }
        transfer.flow.into_iter().for_each(|flow| data::reset(&self.live.shared.splicer, flow));
    }

    /// Takes note of what a reply says of the transfer.
    async fn judge_reply(&self, transfer: &mut Transfer, code: u16) {
        match code {
            ..200 => transfer.has_begun = true,
            211..=213 if transfer.questions > 0 => {
                transfer.questions -= 1;
                transfer.replies -= 1;
            }
            // it does not know ABOR, and goes on
            500..510 if transfer.has_begun && transfer.reset_at.is_some() => transfer.replies -= 1,
            code => {
                transfer.replies -= 1;
                if !std::mem::replace(&mut transfer.is_over, true) {
                    self.is_over(transfer, code).await;
                } else if is_failure(code) {
                    transfer.line.change(|record| record.status = Some(code));
                }
            }
        }
    }

    async fn is_over(&self, transfer: &mut Transfer, code: u16) {
        transfer.line.change(|record| record.status = Some(code));
        if code < 400 {
            // the server has made its connection before it says so
            if let (Some(door), true, Ok(control)) = (&transfer.doors.server, transfer.waiting.is_some(), self.server())
            {
                let accepting = data::accept_from(&self.live.shared, door, control.remote().ip());
                if let Ok(Ok(server)) = timeout(self.front.listener.limits.connect, accepting).await {
                    self.join(transfer, server).await;
                }
            }
        } else if let (Some(flow), false) = (transfer.flow, transfer.has_begun) {
            // nothing moves, and the server may not even know of its connection
            data::reset(&self.live.shared.splicer, flow);
        }
    }

    /// Passes ABOR or STAT on.
    async fn pass_meanwhile(&mut self, transfer: &mut Transfer, command: &Command) -> Result<(), Next> {
        if let Err(fault) = self.judge(command) {
            self.log_refused(command, &fault);
            return self.tell(550, &fault.to_string()).await;
        }
        match command.verb.as_str() {
            "STAT" => transfer.questions += 1,
            _ => transfer.reset_at = transfer.reset_at.or(Some(Instant::now() + BROKEN_OFF_WITHIN)),
        }
        transfer.replies += 1;
        self.send(command).await
    }
}
