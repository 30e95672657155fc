//! Adoption: records for connections whose sockets anybody may have made (bpf/adopt.h).

use crate::{
    Connection, Datapath, Tuple, abi,
    abi::{adopt_op, adopt_result},
    tables::maps::{bytes_of, from_bytes},
    test_run,
};
use std::{io, os::fd::AsFd, time::Duration};

/// A connection with a record that is not complete yet.
#[derive(Clone, Copy, Debug)]
pub struct Attended {
    /// The connection.
    pub connection: Connection,
    /// When it was attended: nanoseconds, CLOCK_MONOTONIC.
    since: u64,
}

/// Reasons why a socket was not adopted.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// There is no such socket in this network namespace.
    #[error("there is no socket for this connection")]
    Gone,
    /// Try again.
    #[error("a process works on the socket, or a segment has just arrived")]
    Busy,
    /// The connection is being opened, was reset, or is closed: by both, or by a FIN that the caller does not know of.
    #[error("the connection is not open")]
    Closing,
    /// A table is full.
    #[error("there is no room for another record")]
    Full,
    /// The connection has a record already.
    #[error("the connection has a record already")]
    Known,
    /// Since the connection was attended, our programs have not seen what is sent to the host, or what it sends: no segment has
    /// passed, or it has other addresses there. Try again.
    #[error("no segment of the connection was seen")]
    Silent,
    /// Its segments come in fragments.
    #[error("the connection has received or sent fragments")]
    Fragments,
    /// It counts congestion marks with AccECN.
    #[error("the connection has negotiated AccECN")]
    Options,
    /// Another connection has the record by now.
    #[error("another connection has the same addresses by now")]
    Other,
    /// The kernel has refused to run the program.
    #[error("cannot run the program that reads a socket")]
    Run(#[source] io::Error),
}

/// The EtherType for experiments (IEEE 802): no protocol looks at the packet that carries the arguments.
const EXPERIMENTAL: [u8; 2] = [0x88, 0xb5];
const ETHERNET: usize = 14;

impl Datapath {
    /// Begins to watch the connection of a socket, which need not be idle. `shut`: the caller has sent its FIN. After
    /// [`await_packets`](crate::await_packets), call [`Datapath::adopt`]. Until then, [`Datapath::forget`] undoes it. Call it in
    /// the network namespace of the data path.
    pub fn attend(&self, leg: &Tuple, shut: bool) -> Result<Attended, AdoptError> {
        let args = abi::adopt_args { op: adopt_op::ADOPT_ATTEND, leg: leg.to_abi(), ..Default::default() };
        let args = self.run_adopt(abi::adopt_args { shut: shut.into(), ..args })?;
        Ok(Attended { connection: Connection { leg: *leg, generation: args.generation }, since: args.since })
    }

    /// Completes the record: from then on, the connection is like one that was known from its SYN on. `read`, `written`: the
    /// socket's positions in the streams, in bytes. Our FIN counts as one, the host's does not. `silent`: time since its host was
    /// heard, at least. Nobody may
    /// read or write it during the call. Fails with [`AdoptError::Silent`] until a segment to the host has passed since the
    /// connection was attended, and one from the host unless its segments come in where ours leave.
    pub fn adopt(
        &self,
        attended: &Attended,
        shut: bool,
        read: u64,
        written: u64,
        silent: Duration,
    ) -> Result<(), AdoptError> {
        let Connection { leg, generation } = attended.connection;
        let (op, since) = (adopt_op::ADOPT_FINISH, attended.since);
        let args = abi::adopt_args { op, leg: leg.to_abi(), generation, since, ..Default::default() };
        let silent = silent.as_millis().try_into().unwrap_or(u32::MAX);
        let args = abi::adopt_args { shut: shut.into(), consumed: read, produced: written, silent, ..args };
        self.run_adopt(args).map(drop)
    }

    fn run_adopt(&self, args: abi::adopt_args) -> Result<abi::adopt_args, AdoptError> {
        let packet = [&[0; ETHERNET - EXPERIMENTAL.len()], &EXPERIMENTAL[..], bytes_of(&args)].concat();
        let mut out = Vec::new();
        let ran = test_run::run(self.adopt.as_fd(), &packet, &test_run::TestContext::default(), &mut out);
        match ran.map_err(AdoptError::Run)? {
            (0, _) => {}
            _ => return Err(AdoptError::Run(io::Error::other("the arguments could not be copied"))),
        }
        let args: abi::adopt_args = from_bytes(&out[ETHERNET..]);
        Err(match args.result {
            adopt_result::ADOPT_OK => return Ok(args),
            adopt_result::ADOPT_GONE => AdoptError::Gone,
            adopt_result::ADOPT_BUSY => AdoptError::Busy,
            adopt_result::ADOPT_CLOSING => AdoptError::Closing,
            adopt_result::ADOPT_FULL => AdoptError::Full,
            adopt_result::ADOPT_KNOWN => AdoptError::Known,
            adopt_result::ADOPT_SILENT => AdoptError::Silent,
            adopt_result::ADOPT_FRAGMENTS => AdoptError::Fragments,
            adopt_result::ADOPT_OPTIONS => AdoptError::Options,
            _ => AdoptError::Other,
        })
    }
}
