//! Takes over what an earlier process has pinned, or removes it: before anything is loaded.

use crate::{
    abi,
    abi_id::{AbiId, id_in},
    attaching::pins::{detach_all, refuse_others},
    error::{OpenError, kernel, system},
    network::devices::Device,
    random::random,
    tables::maps::from_bytes,
    tables::pinned::{Holdings, abi_value},
    tables::pinned_names::PINNED,
};
use libbpf_rs::{MapCore, MapHandle};
use std::{fs, io, path::Path};

/// What is pinned in the directory, as far as it can be used.
pub(crate) struct Tables {
    /// Whether there are none, so that the load creates them.
    pub are_new: bool,
    /// Number of flows for which they are made.
    pub flows: u32,
    /// Seed of their hashes.
    pub seed: u64,
}

impl Tables {
    /// Looks at the pins, whose lock this process holds, and removes those that are of no use. Fails if something would be lost
    /// with them. `namespace`: the cookie of this network namespace; `wanted`: number of flows; `devices`: all of the namespace.
    pub fn at(pin: &Path, namespace: u64, wanted: u32, devices: &[Device]) -> Result<Tables, OpenError> {
        let found = usable(pin, namespace, wanted)?;
        refuse_others(devices, pin)?;
        Ok(match found {
            Some(abi) => Tables { are_new: false, flows: pinned_flows(pin)?, seed: abi.seed },
            None => {
                remove_unfinished(pin)?;
                Tables { are_new: true, flows: wanted, seed: random() }
            }
        })
    }
}

/// Returns the description of the pinned maps if they can be used. Removes them otherwise.
fn usable(pin: &Path, namespace: u64, wanted: u32) -> Result<Option<abi::abi>, OpenError> {
    let value = abi_value(pin).map_err(system("read pinned map"))?;
    let Some((value, found)) = value.and_then(|value| id_in(&value).map(|id| (value, id))) else {
        return Ok(None); // a process has died before it had finished creating them
    };
    let is_whole = value.len() >= size_of::<abi::abi>(); // that of the first version was shorter, without the namespace
    let abi: Option<abi::abi> = is_whole.then(|| from_bytes(&value));
    if abi.is_some_and(|abi| abi.namespace != namespace) {
        tracing::info!(pin = %pin.display(), "what is pinned belonged to a namespace that is gone: removed");
        return clear(pin).map(|()| None);
    }
    let Some(abi) = abi.filter(|_| found == AbiId::OURS) else {
        let held = held_in(pin)?;
        if held != Holdings::default() {
            return Err(OpenError::Abi { path: pin.to_owned(), found, held });
        }
        tracing::info!(pin = %pin.display(), "what is pinned is of another version, and holds nothing: removed");
        return clear(pin).map(|()| None);
    };
    if PINNED.iter().any(|name| !pin.join(name).exists()) {
        tracing::warn!(pin = %pin.display(), "cannot take over flows of an earlier process, because some of its pins were removed: they are lost");
        return clear(pin).map(|()| None);
    }
    Ok(keeps_size(pin, wanted)?.then_some(abi))
}

fn held_in(pin: &Path) -> Result<Holdings, OpenError> {
    Holdings::of(pin).map_err(system("read pinned maps"))
}

/// Removes the maps of a process that died before it attached anything.
fn remove_unfinished(pin: &Path) -> Result<(), OpenError> {
    for name in PINNED {
        match fs::remove_file(pin.join(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(system("remove pinned maps")(e)),
            _ => {}
        }
    }
    Ok(())
}

/// Empties the directory, which is locked itself. Everything that was pinned is detached and freed.
fn clear(pin: &Path) -> Result<(), OpenError> {
    detach_all(pin);
    let empty = || fs::read_dir(pin)?.try_for_each(|entry| fs::remove_file(entry?.path()));
    empty().map_err(system("remove pinned maps and links"))
}

/// Returns whether the pinned tables can be used. Tables that hold
/// something keep their size; empty ones of another size are removed.
fn keeps_size(pin: &Path, wanted: u32) -> Result<bool, OpenError> {
    let is = pinned_flows(pin)?;
    if is == wanted {
        return Ok(true);
    }
    let held = held_in(pin)?;
    if held == Holdings::default() {
        clear(pin)?;
        return Ok(false);
    }
    tracing::warn!(
        "the tables of an earlier process have room for {is} flows and hold {held}: they stay as they are, and --max-flows {wanted} \
         is for the next start that finds them empty; `longsplice stop --flush` ends what they hold"
    );
    Ok(true)
}

/// Returns the number of flows for which the pinned maps were created.
fn pinned_flows(pin: &Path) -> Result<u32, OpenError> {
    let legs = MapHandle::from_pinned_path(pin.join("legs")).map_err(kernel("open pinned map"))?;
    Ok(legs.max_entries() / 2)
}

/// Removes what a start has pinned and attached, if the start fails. Only where nothing was pinned before.
pub(crate) struct Begun<'a>(pub Option<&'a Path>);

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.map(clear) {
            tracing::warn!(%error, "cannot remove the pins of a failed start: they stay");
        }
    }
}
