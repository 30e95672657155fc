//! Stack space and verified instructions of the compiled programs. Both are kept well below the limits of the running
//! kernel, because other versions may count differently.
use longsplice_datapath::testing::{OBJECT, PROGRAMS_OBJECT, TPOT_OBJECT, TPOT_ROUTER_OBJECT, Verified, verify};
use std::collections::{BTreeMap, BTreeSet};

/// Kernels before 6.8 round each frame up to this many bytes; later ones round to 16.
const ROUNDED: u32 = 32;
/// Maximum stack of a call chain in bytes (MAX_BPF_STACK).
const STACK: u32 = 512;
/// Maximum number of functions in a call chain (MAX_CALL_FRAMES).
const FRAMES: usize = 8;
/// Bytes of stack that must be left unused.
const LEFT: u32 = 64;
/// Maximum number of processed instructions. The verifier's limit is a million.
const INSTRUCTIONS: u32 = 500_000;

/// All objects.
const OBJECTS: [&[u8]; 4] = [OBJECT, TPOT_OBJECT, TPOT_ROUTER_OBJECT, PROGRAMS_OBJECT];

/// A function in the object: its position, stack size and callees.
#[derive(Debug, Default)]
struct Function {
    name: String,
    stack: u32,
    calls: BTreeSet<Place>,
}

/// Section and offset.
type Place = (usize, u64);

fn number<const N: usize>(b: &[u8], at: u64) -> [u8; N] {
    b[at as usize..][..N].try_into().unwrap()
}
fn u16_at(b: &[u8], at: u64) -> u64 {
    u16::from_le_bytes(number(b, at)).into()
}
fn u32_at(b: &[u8], at: u64) -> u64 {
    u32::from_le_bytes(number(b, at)).into()
}
fn u64_at(b: &[u8], at: u64) -> u64 {
    u64::from_le_bytes(number(b, at))
}

/// The fields needed of an ELF section header, Elf64_Shdr in <elf.h>.
struct Section<'a> {
    kind: u64,
    code: bool,
    link: u64,
    of: u64,
    bytes: &'a [u8],
}

fn sections(elf: &[u8]) -> Vec<Section<'_>> {
    const EXECUTABLE: u64 = 4; // SHF_EXECINSTR
    let (table, size, count) = (u64_at(elf, 0x28), u16_at(elf, 0x3a), u16_at(elf, 0x3c));
    (0..count)
        .map(|i| table + i * size)
        .map(|at| Section {
            kind: u32_at(elf, at + 4),
            code: u64_at(elf, at + 8) & EXECUTABLE != 0,
            link: u32_at(elf, at + 0x28),
            of: u32_at(elf, at + 0x2c),
            bytes: elf
                .get(u64_at(elf, at + 0x18) as usize..)
                .and_then(|b| b.get(..u64_at(elf, at + 0x20) as usize))
                .unwrap_or(&[]),
        })
        .collect()
}

/// All functions by position.
fn functions(elf: &[u8]) -> BTreeMap<Place, Function> {
    const SYMBOLS: u64 = 2; // SHT_SYMTAB
    const RELOCATIONS: u64 = 9; // SHT_REL
    const FUNCTION: u8 = 2; // STT_FUNC
    const CALL: u64 = 10; // R_BPF_64_32
    let all = sections(elf);
    let symbols = all.iter().find(|s| s.kind == SYMBOLS).expect("a symbol table");
    let names = all[symbols.link as usize].bytes;
    let name =
        |at: u64| names[at as usize..].split(|b| *b == 0).next().map(|b| String::from_utf8_lossy(b).into_owned());
    // section and value of the symbol of a relocation
    let place = |symbol: u64| (u16_at(symbols.bytes, symbol * 24 + 6) as usize, u64_at(symbols.bytes, symbol * 24 + 8));
    let mut relocated = BTreeMap::new();
    for table in all.iter().filter(|s| s.kind == RELOCATIONS && all[s.of as usize].code) {
        for r in table.bytes.chunks_exact(16) {
            let (kind, symbol) = (u32_at(r, 8), place(u32_at(r, 12)));
            assert!(
                kind == CALL || !all[symbol.0].code,
                "the address of a function is taken: its calls are not followed"
            );
            if kind == CALL {
                relocated.insert((table.of as usize, u64_at(r, 0)), symbol);
            }
        }
    }
    let mut found = BTreeMap::new();
    for symbol in symbols.bytes.chunks_exact(24).filter(|s| s[4] & 0xf == FUNCTION) {
        let (section, from, size) = (u16_at(symbol, 6) as usize, u64_at(symbol, 8), u64_at(symbol, 16));
        let mut f = Function { name: name(u32_at(symbol, 0)).unwrap(), ..Default::default() };
        let called = |at: u64, relative: i64| {
            let (section, from) = relocated.get(&(section, at)).copied().unwrap_or((section, at));
            (section, from.wrapping_add_signed((relative + 1) * 8))
        };
        read_function(&all[section].bytes[from as usize..][..size as usize], from, &mut f, called);
        found.insert((section, from), f);
    }
    found
}

/// Follows the frame pointer, r10, through the instructions (struct bpf_insn of <linux/bpf.h>) in program order.
fn read_function(code: &[u8], from: u64, f: &mut Function, called: impl Fn(u64, i64) -> Place) {
    const FRAME: usize = 10;
    let mut below: [Option<i64>; 11] = [None; 11]; // registers that point into the frame
    below[FRAME] = Some(0);
    let mut at = from;
    for insn in code.chunks_exact(8) {
        let (op, dst, src) = (insn[0], usize::from(insn[1] & 0xf), usize::from(insn[1] >> 4));
        let offset = i64::from(i16::from_le_bytes(number(insn, 2)));
        let immediate = i64::from(i32::from_le_bytes(number(insn, 4)));
        let mut deep = |n: i64| f.stack = f.stack.max(u32::try_from(-n).unwrap_or(0));
        match (op & 7, op) {
            (1, _) => {
                below[src].iter().for_each(|n| deep(n + offset)); // load
                below[dst] = None;
            }
            (2 | 3, _) => below[dst].iter().for_each(|n| deep(n + offset)), // store
            (7, 0xbf) => below[dst] = below[src],                           // dst = src
            (7, 0x07) => {
                below[dst] = below[dst].map(|n| n + immediate); // dst += immediate
                below[dst].into_iter().for_each(deep);
            }
            (0 | 4 | 7, _) => below[dst] = None,
            (5, 0x85) => {
                // BPF_PSEUDO_CALL; other calls are to kernel functions or have no section
                if src == 1 {
                    f.calls.extend(Some(called(at, immediate)).filter(|(section, _)| *section != 0));
                }
                below[..6].fill(None);
            }
            _ => {}
        }
        at += 8;
    }
}

/// The deepest call chain from a function: stack bytes and names.
fn deepest(all: &BTreeMap<Place, Function>, from: Place) -> (u32, Vec<String>) {
    let f = &all[&from];
    let (below, mut chain) = f.calls.iter().map(|to| deepest(all, *to)).max().unwrap_or_default();
    chain.insert(0, format!("{} {}", f.name, f.stack));
    // even an empty frame takes some bytes
    (below + f.stack.max(1).next_multiple_of(ROUNDED), chain)
}

/// Collects the frames of all functions reachable from a function, each once.
fn frames(all: &BTreeMap<Place, Function>, from: Place, seen: &mut BTreeMap<Place, u32>) {
    if seen.insert(from, all[&from].stack).is_none() {
        all[&from].calls.iter().for_each(|to| frames(all, *to, seen));
    }
}

fn of_name(all: &BTreeMap<Place, Function>, name: &str) -> Place {
    *all.iter().find(|(_, f)| f.name == name).unwrap_or_else(|| panic!("no function {name}")).0
}

#[test]
fn the_deepest_chain_of_calls_leaves_room_on_the_stack() {
    let all = OBJECTS.map(functions);
    assert!(all[0].len() > 20 && all[1].len() > 3 && all[2].len() > 2, "{all:?}");
    let mut chains: Vec<_> = all.iter().flat_map(|all| all.keys().map(|from| deepest(all, *from))).collect();
    chains.sort();
    for (bytes, chain) in chains.iter().rev().take(5) {
        println!("{bytes}: {}", chain.join(" > "));
    }
    let longest = chains.iter().map(|(_, chain)| chain).max_by_key(|chain| chain.len()).unwrap();
    println!("{} of {FRAMES} frames: {}", longest.len(), longest.join(" > "));
    assert!(longest.len() < FRAMES, "no frame of {FRAMES} is left: {}", longest.join(" > "));
    let (bytes, chain) = chains.last().unwrap();
    println!("{} bytes of {STACK} are left", STACK.saturating_sub(*bytes));
    assert!(bytes + LEFT <= STACK, "{bytes} bytes of {STACK}, {LEFT} have to be left: {}", chain.join(" > "));
}

#[test]
#[ignore = "root"]
fn the_verifier_is_done_in_half_the_instructions_it_allows() {
    let programs = OBJECTS.map(|object| verify(object).expect("the programs load: root, and no more than this"));
    assert!(
        programs[0].len() >= 5 && programs[1].len() == 3 && programs[2..].iter().all(|p| p.len() == 1),
        "{programs:?}"
    );
    let of = OBJECTS.map(functions);
    let all = programs.into_iter().zip(&of).flat_map(|(programs, all)| programs.into_iter().map(move |p| (p, all)));
    for (Verified { program, instructions, stacks }, all) in all {
        println!("{program}: {instructions} instructions");
        assert!(instructions <= INSTRUCTIONS, "{program}: {instructions} instructions, at most {INSTRUCTIONS}");
        // the size read from the object is at least the verifier's, which counts in words
        let mut read = BTreeMap::new();
        frames(all, of_name(all, &program), &mut read);
        let (mut read, mut stacks): (Vec<u32>, _) =
            (read.into_values().map(|n| n.next_multiple_of(8)).collect(), stacks);
        read.sort();
        stacks.sort();
        assert!(
            read.len() == stacks.len() && read.iter().zip(&stacks).all(|(a, b)| a >= b),
            "{program}: {read:?} {stacks:?}"
        );
    }
}
