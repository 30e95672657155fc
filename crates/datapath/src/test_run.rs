//! Runs programs on single packets: for tests, and those that read sockets.

use crate::{Datapath, abi};
use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd},
};

/// Fields of `struct __sk_buff` for [`Datapath::test_run_with`].
#[derive(Clone, Copy, Debug, Default)]
pub struct TestContext {
    /// `skb->mark`.
    pub mark: u32,
    /// Payload bytes per segment of a large packet; 0: not a large packet.
    pub gso_size: u32,
    /// Number of segments.
    pub gso_segs: u32,
}

impl Datapath {
    /// Runs the ingress or egress program on one packet, for tests. Writes
    /// the resulting packet to `out`, and returns the program's return code.
    pub fn test_run(&self, egress: bool, packet: &[u8], out: &mut Vec<u8>) -> io::Result<i32> {
        self.test_run_with(egress, packet, &TestContext::default(), out)
    }

    /// Runs a program like [`Datapath::test_run`], with metadata that the kernel keeps beside the packet's bytes.
    pub fn test_run_with(
        &self,
        egress: bool,
        packet: &[u8],
        context: &TestContext,
        out: &mut Vec<u8>,
    ) -> io::Result<i32> {
        run(if egress { &self.egress } else { &self.ingress }.as_fd(), packet, context, out).map(|(code, _)| code)
    }
}

/// Runs a program on one packet. Returns its return code, and the packet's mark.
pub(crate) fn run(
    program: BorrowedFd<'_>,
    packet: &[u8],
    context: &TestContext,
    out: &mut Vec<u8>,
) -> io::Result<(i32, u32)> {
    let TestContext { mark, gso_size, gso_segs } = *context;
    // SAFETY: __sk_buff is plain data; the kernel requires unset fields and padding to be zero.
    let mut skb: abi::__sk_buff = unsafe { std::mem::zeroed() };
    (skb.mark, skb.gso_size, skb.gso_segs) = (mark, gso_size, gso_segs);
    let mut after = skb;
    // SAFETY: bpf_test_run_opts is plain data; all-zero is valid.
    let mut opts: libbpf_sys::bpf_test_run_opts = unsafe { std::mem::zeroed() };
    out.resize(packet.len() + 256, 0);
    opts.sz = size_of_val(&opts) as _;
    opts.data_in = packet.as_ptr().cast();
    opts.data_size_in = packet.len() as u32;
    opts.data_out = out.as_mut_ptr().cast();
    opts.data_size_out = out.len() as u32;
    opts.ctx_in = (&raw const skb).cast();
    opts.ctx_size_in = size_of_val(&skb) as u32;
    opts.ctx_out = (&raw mut after).cast();
    opts.ctx_size_out = size_of_val(&after) as u32;
    opts.repeat = 1;
    // SAFETY: the pointers and sizes are those of live buffers.
    let r = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &mut opts) };
    if r < 0 {
        return Err(io::Error::from_raw_os_error(-r));
    }
    out.truncate(opts.data_size_out as usize);
    Ok((opts.retval as i32, after.mark))
}
