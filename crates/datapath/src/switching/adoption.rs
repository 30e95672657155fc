//! Adoption: records for connections whose sockets anybody may have made (bpf/adopt.h).

use crate::{
    Connection, Datapath, Tuple, abi,
    abi::{adopt_op, adopt_result},
    tables::maps::{bytes_of, from_bytes},
    test_run,
};
use std::{io, os::fd::AsFd};

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
    /// The connection is being opened or closed, at least in one direction, or was reset.
    #[error("the connection is not open in both directions")]
    Closing,
    /// A table is full.
    #[error("there is no room for another record")]
    Full,
    /// The connection has a record already.
    #[error("the connection has a record already")]
    Known,
    /// No segment of the connection has passed in each direction since it was attended. Try again.
    #[error("no segment has passed in each direction yet")]
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
    /// Begins to watch the connection of a socket, which need not be idle. After [`await_programs`](crate::await_programs), call
    /// [`Datapath::adopt`]. Until then, [`Datapath::forget`] undoes it. Call it in the network namespace of the data path.
    pub fn attend(&self, leg: &Tuple) -> Result<Attended, AdoptError> {
        let args = self.run_adopt(adopt_op::ADOPT_ATTEND, leg, 0, 0)?;
        Ok(Attended { connection: Connection { leg: *leg, generation: args.generation }, since: args.since })
    }

    /// Completes the record: from then on, the connection is like one that was known from its SYN on, and its first byte is the next
    /// one that is read from the socket, or written to it. Nobody may read or write it during the call. Fails with
    /// [`AdoptError::Silent`] until a segment of each host has passed since the connection was attended.
    pub fn adopt(&self, attended: &Attended) -> Result<(), AdoptError> {
        let Connection { leg, generation } = &attended.connection;
        self.run_adopt(adopt_op::ADOPT_FINISH, leg, *generation, attended.since).map(drop)
    }

    fn run_adopt(&self, op: adopt_op, leg: &Tuple, generation: u32, since: u64) -> Result<abi::adopt_args, AdoptError> {
        let args = abi::adopt_args { op, leg: leg.to_abi(), generation, since, ..Default::default() };
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
