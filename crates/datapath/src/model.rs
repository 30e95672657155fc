//! The decisions of the data path, compiled natively: what `bpf/step.h` and `bpf/record.h`
//! do with the segments of one flow. For simulators; does not touch the kernel.

use crate::{Frozen, Half, Pair, PathView, Side, SwitchError, Switched, abi, switching::switch};
use std::{
    ffi::c_int,
    fmt,
    marker::PhantomData,
    ptr::{self, NonNull},
};

/// An arriving segment.
pub use crate::abi::seg as Seg;

/// An outgoing copy of a segment.
pub use crate::abi::edit as Edit;

/// The result of a leg's handshake. Mirrors `struct model_start`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct Start {
    pub irs: u32,
    pub iss: u32,
    pub edge_in: u32,
    pub edge_out: u32,
    pub tsval_in: u32,
    pub tsval_out: u32,
    pub flags: u32,
    pub wscale_in: u8,
    pub wscale_out: u8,
}

#[repr(C)]
#[derive(Debug, Default)]
struct Out {
    local: u8,
    fwd: u8,
    plain: u8,
    back: u8,
    events: u8,
    dropped: u32,
    l: Edit,
    f: Edit,
}

#[repr(C)]
struct Meanwhile {
    meetings: u32,
    leg: u32,
    seg: Seg,
    out: Out,
}

/// What a processor does in a [race](Model::race). Mirrors `struct model_job`.
#[repr(C)]
#[derive(Debug)]
pub struct Job<'a> {
    switch: Option<&'a mut abi::switch_call>,
    from: u32,
    done: u8,
    over: u8,
    seg: Seg,
    out: Out,
}

impl<'a> Job<'a> {
    /// A freeze, commit, unsplice or look.
    pub fn switch(switch: &'a mut Switch) -> Job<'a> {
        Job { switch: Some(&mut switch.0), from: 0, done: 0, over: 0, seg: Seg::default(), out: Out::default() }
    }

    /// A segment from a host. What follows it in the list is an answer, so that comes only if the segment is forwarded.
    pub fn segment(from: Side, seg: Seg) -> Job<'a> {
        Job { switch: None, from: index(from) as u32, done: 0, over: 0, seg, out: Out::default() }
    }

    /// Returns the fate of a segment, as [`Model::ingress`] does. `None`: it never came.
    pub fn fate(&self) -> Option<(Fate, u8)> {
        (self.done != 0).then(|| fate(&self.out))
    }

    /// Returns whether the flow was [over](Model::is_over) when this was done.
    pub fn was_over(&self) -> bool {
        self.over != 0
    }
}

#[repr(C)]
struct Processor<'a, 'b> {
    jobs: *mut Job<'b>,
    n: u64,
    borrowed: PhantomData<&'a mut Job<'b>>,
}

/// A switch call with its answer, as the data path's program uses it.
#[derive(Clone, Copy, Debug)]
pub struct Switch(abi::switch_call);

impl Switch {
    /// Creates a call about two legs of this generation.
    pub fn new(op: abi::switch_op, halves: Pair<&Half>, generation: u32) -> Switch {
        Switch(switch::call(op, halves, Pair::both(generation)))
    }

    /// Returns the arguments that do not belong to one leg.
    pub fn args(&mut self) -> &mut abi::switch_args {
        &mut self.0.args
    }

    /// Evaluates the answer. The model has no devices; its hosts accept any packet.
    fn answer(&self) -> Result<abi::switch_call, SwitchError> {
        switch::outcome(self.0.args.result)?;
        let hop = abi::hop { mss: u16::MAX.into(), ..Default::default() };
        Ok(abi::switch_call { hop_a: hop, hop_b: hop, ..self.0 })
    }

    /// Returns the result of a freeze, like [`Datapath::freeze`](crate::Datapath::freeze).
    pub fn frozen(&self, consumed: Pair<u64>) -> Result<Frozen, SwitchError> {
        self.answer().map(|call| switch::frozen(&call, consumed))
    }

    /// Returns the state of the legs, like the other switch calls.
    pub fn switched(&self) -> Result<Switched, SwitchError> {
        self.answer().map(|call| switch::switched(&call))
    }
}

/// The fate of a segment from a host.
#[derive(Clone, Copy, Debug)]
pub enum Fate {
    /// Dropped, with the number of the verdict.
    Dropped(u32),
    /// Sent in these copies.
    Sent {
        /// The copy for the local socket; unchanged if `plain`.
        local: Option<Edit>,
        /// The copy for the other host.
        forwarded: Option<Edit>,
        /// Whether the local copy is the unchanged segment.
        plain: bool,
    },
    /// Answered with this reset: its connection is over.
    Answered(Edit),
}

/// How bytes passed in a [leap](Model::leap).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leap {
    /// Past the sockets.
    Forwarded,
    /// Through the sockets.
    Copied,
}

enum Opaque {}

unsafe extern "C" {
    fn model_new(start: *const Start) -> *mut Opaque;
    fn model_free(m: *mut Opaque);
    fn model_time(m: *mut Opaque, now: u64);
    fn model_meanwhile(m: *mut Opaque, w: *mut Meanwhile);
    fn model_ingress(m: *mut Opaque, i: c_int, s: *const Seg, out: *mut Out);
    fn model_egress(m: *mut Opaque, i: c_int, s: *const Seg, e: *mut Edit) -> c_int;
    fn model_replace(m: *mut Opaque, start: *const Start);
    fn model_is_over(m: *const Opaque) -> c_int;
    fn model_switch(m: *mut Opaque, c: *mut abi::switch_call);
    fn model_race(m: *mut Opaque, of: *const Processor<'_, '_>, n: c_int, seed: u64);
    fn model_leap(m: *mut Opaque, i: c_int, n: u64, copied: c_int) -> c_int;
    fn model_path(m: *const Opaque, i: c_int, to: *mut abi::path);
    fn model_look(m: *const Opaque, i: c_int, to: *mut abi::leg);
    fn model_leg_size() -> u64;
    fn model_place(t: *const abi::tuple, v6: c_int, seed: u64, pages: u32, way: u32) -> u64;
    fn model_siphash(key: *const u64, message: *const u8, len: usize) -> u64;
}

/// Number of slots in which the entry of a key may be: `WAYS` of bpf/place.h.
pub const WAYS: u32 = 64;

/// Returns one of the places of a key in the table for `flows` flows: page and slot.
pub fn place(leg: &crate::Tuple, seed: u64, flows: u32, way: u32) -> (u32, u32) {
    let v6 = leg.remote.is_ipv6();
    let pages = if v6 { crate::tables::pages::PATHS6 } else { crate::tables::pages::PATHS4 }.pages(flows);
    // SAFETY: reads one key.
    let at = unsafe { model_place(&leg.to_abi(), v6.into(), seed, pages, way) };
    ((at >> 32) as u32, at as u32)
}

/// Returns the SipHash-2-4 of a message, as bpf/tpot/siphash.h computes it. The key consists of two little-endian words.
pub fn siphash(key: [u64; 2], message: &[u8]) -> u64 {
    // SAFETY: reads the key and the message, whose length is passed.
    unsafe { model_siphash(key.as_ptr(), message.as_ptr(), message.len()) }
}

/// One flow: two legs and their path entries.
pub struct Model(NonNull<Opaque>);

// SAFETY: it owns its memory, which is not tied to a thread.
unsafe impl Send for Model {}

impl Model {
    /// Creates a flow of two established connections that have carried nothing.
    pub fn new(start: Pair<Start>) -> Model {
        let start: [Start; 2] = start.into();
        // SAFETY: reads two elements; aborts rather than return null.
        Model(NonNull::new(unsafe { model_new(start.as_ptr()) }).expect("aborts instead"))
    }

    /// Sets the clock, in nanoseconds.
    pub fn time(&mut self, now: u64) {
        // SAFETY: a live pointer.
        unsafe { model_time(self.0.as_ptr(), now) }
    }

    /// Handles a segment from a host. Events are returned
    /// as a set of bits, `1 << event_kind`; bit 0: the segment is held.
    pub fn ingress(&mut self, from: Side, s: &Seg) -> (Fate, u8) {
        let mut out = Out::default();
        // SAFETY: live pointers; the index is 0 or 1.
        unsafe { model_ingress(self.0.as_ptr(), index(from), s, &mut out) };
        fate(&out)
    }

    /// Runs `work`, during which a segment from a host arrives on another processor, just before the first one takes a lock, or
    /// changes a word that both know, for the `meetings`th time. Returns the fate of that segment, as [`Model::ingress`]
    /// does. `None`: it did that less often, so the segment has not arrived.
    pub fn meanwhile<T>(
        &mut self,
        (meetings, from, s): (u32, Side, &Seg),
        work: impl FnOnce(&mut Model) -> T,
    ) -> (T, Option<(Fate, u8)>) {
        let mut meanwhile = Meanwhile { meetings, leg: index(from) as u32, seg: *s, out: Out::default() };
        // SAFETY: live pointers.
        unsafe { model_meanwhile(self.0.as_ptr(), &mut meanwhile) };
        let done = work(self);
        // SAFETY: as above; the pointer is reset before `meanwhile` ends. If `work` panics, the model is only freed.
        unsafe { model_meanwhile(self.0.as_ptr(), ptr::null_mut()) };
        (done, (meanwhile.meetings == 0).then(|| fate(&meanwhile.out)))
    }

    /// Handles a segment from the local socket of a leg. `None`: muted.
    pub fn egress(&mut self, leg: Side, s: &Seg) -> Option<Edit> {
        let mut e = Edit::default();
        // SAFETY: live pointers; the index is 0 or 1.
        let go = unsafe { model_egress(self.0.as_ptr(), index(leg), s, &mut e) };
        (go != 0).then_some(e)
    }

    /// Puts two new connections into the place of the flow's. The next generation is higher by two; the first one is 1.
    pub fn replace(&mut self, start: Pair<Start>) {
        let start: [Start; 2] = start.into();
        // SAFETY: a live pointer; reads two elements.
        unsafe { model_replace(self.0.as_ptr(), start.as_ptr()) }
    }

    /// Returns whether the client may begin a new connection from the same port: a SYN replaces the old one.
    pub fn is_over(&self) -> bool {
        // SAFETY: a live pointer.
        unsafe { model_is_over(self.0.as_ptr()) != 0 }
    }

    /// Runs a freeze, commit, unsplice or look.
    pub fn switch(&mut self, switch: &mut Switch) {
        // SAFETY: live pointers.
        unsafe { model_switch(self.0.as_ptr(), &mut switch.0) }
    }

    /// Runs processors side by side, each with its jobs in their order. Whenever one is about to take a lock, or to change a word
    /// that all know, `seed` says which of them goes on.
    pub fn race<'a>(&mut self, processors: &mut [&mut [Job<'a>]], seed: u64) {
        let of = processors.iter_mut();
        let of: Vec<Processor<'_, 'a>> =
            of.map(|jobs| Processor { jobs: jobs.as_mut_ptr(), n: jobs.len() as u64, borrowed: PhantomData }).collect();
        // SAFETY: live pointers to as many elements as is said; all return before this does.
        unsafe { model_race(self.0.as_ptr(), of.as_ptr(), of.len() as c_int, seed) }
    }

    /// Moves all positions on by `n` bytes from a host, as if as many had passed, and nothing else. `None` if that is not possible
    /// now. The other host must have acknowledged everything. `copied`: they may pass through the sockets.
    pub fn leap(&mut self, from: Side, n: u64, copied: bool) -> Option<Leap> {
        // SAFETY: a live pointer; the index is 0 or 1.
        match unsafe { model_leap(self.0.as_ptr(), index(from), n, copied.into()) } {
            1 => Some(Leap::Forwarded),
            2 => Some(Leap::Copied),
            _ => None,
        }
    }

    /// Returns the path entry of packets from a host.
    pub fn path(&self, from: Side) -> PathView {
        let mut p = abi::path::default();
        // SAFETY: live pointers; the index is 0 or 1.
        unsafe { model_path(self.0.as_ptr(), index(from), &mut p) };
        PathView::new(&p)
    }

    /// Returns the record of a leg.
    pub fn leg(&self, side: Side) -> abi::leg {
        let mut l = abi::leg::default();
        // SAFETY: no pointer is passed.
        assert_eq!(unsafe { model_leg_size() } as usize, size_of_val(&l), "one layout");
        // SAFETY: live pointers; the index is 0 or 1; the sizes were compared.
        unsafe { model_look(self.0.as_ptr(), index(side), &mut l) };
        l
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: made by model_new, freed once.
        unsafe { model_free(self.0.as_ptr()) }
    }
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(Side::BOTH.map(|side| self.leg(side))).finish()
    }
}

fn fate(out: &Out) -> (Fate, u8) {
    if out.back != 0 {
        return (Fate::Answered(out.f), out.events);
    }
    if out.local == 0 && out.fwd == 0 {
        return (Fate::Dropped(out.dropped), out.events);
    }
    let local = (out.local != 0).then_some(out.l);
    let forwarded = (out.fwd != 0).then_some(out.f);
    (Fate::Sent { local, forwarded, plain: out.plain != 0 }, out.events)
}

/// Returns the index of a leg in the model.
fn index(side: Side) -> c_int {
    match side {
        Side::Client => 0,
        Side::Server => 1,
    }
}
