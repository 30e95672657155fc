//! What this process has attached and pinned: the lock of the directory of pins, and descriptors of all pinned
//! objects. So objects survive when their pins are removed, and can be attached again when they were detached.

use crate::{
    attaching::attach::{Hook, Place, attach, attached_program, create, replace},
    attaching::guard::Guard,
    attaching::pins::{Owned, refuse_others},
    error::{OpenError, kernel},
    network::devices::{Device, devices},
    tables::bpffs::pin,
};
use libbpf_rs::Program;
use std::{
    collections::HashMap,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
    slice,
};

/// The result of a repair.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Number of pins that were restored. Without them, no other process could have taken over.
    pub pins: usize,
    /// Names of devices to which programs were attached again. The data path has not seen their packets meanwhile.
    pub devices: Vec<String>,
    /// Names of devices that are gone.
    pub gone: Vec<String>,
}

/// A kernel object with a pin in the directory.
struct Pin {
    name: String,
    object: OwnedFd,
    /// Device and inode of the pin.
    file: Option<(u64, u64)>,
}

impl Pin {
    /// Describes an existing pin.
    fn of(name: String, object: OwnedFd, folder: &Path) -> Pin {
        let file = identity(&folder.join(&name));
        Pin { name, object, file }
    }

    fn is_in(&self, folder: &Path) -> bool {
        self.file.is_some() && identity(&folder.join(&self.name)) == self.file
    }

    fn put_into(&mut self, folder: &Path) -> io::Result<()> {
        let path = folder.join(&self.name);
        remove(&path)?; // something else may be in its place
        pin(self.object.as_fd(), &path)?;
        self.file = identity(&path);
        Ok(())
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// A program attached to a device.
struct AttachedProgram {
    hook: Hook,
    device: u32,
    link: Pin,
}

/// Everything that is pinned and attached, and the lock of the pins.
pub(crate) struct Attachment {
    owned: Owned,
    /// Programs and their ids, in the order of [`Hook::ALL`]. Without XDP, if no device is to run it.
    programs: Vec<(OwnedFd, u32)>,
    maps: Vec<Pin>,
    links: Vec<AttachedProgram>,
    /// Names that the attached devices had when they were last listed.
    names: HashMap<u32, String>,
    /// `None`: the kernel has no support for it.
    guard: Option<Guard>,
}

impl Attachment {
    /// Takes everything that is pinned and attached.
    pub fn new(
        owned: Owned,
        programs: Vec<OwnedFd>,
        maps: Vec<(String, OwnedFd)>,
        links: Vec<(Hook, u32, OwnedFd)>,
        guard: Option<Guard>,
    ) -> Result<Attachment, OpenError> {
        let maps = maps.into_iter().map(|(name, map)| Pin::of(name, map, &owned.path)).collect();
        let links = links
            .into_iter()
            .map(|(hook, device, link)| AttachedProgram {
                hook,
                device,
                link: Pin::of(hook.pin(device), link, &owned.path),
            })
            .collect();
        let number = |program: OwnedFd| {
            let number = Program::id_from_fd(program.as_fd()).map_err(kernel("ask for a program"));
            number.map(|n| (program, n))
        };
        let programs = programs.into_iter().map(number).collect::<Result<_, _>>()?;
        Ok(Attachment { owned, programs, maps, links, names: HashMap::new(), guard })
    }

    /// Checks whether everything is still in place, and repairs it. Costs a handful of system
    /// calls if nothing is wrong. `mistrust` is called before anything is attached again.
    pub fn mend(&mut self, mistrust: impl FnOnce() -> io::Result<()>) -> Result<Mended, OpenError> {
        let mut mended = Mended::default();
        if !self.owned.is_there() {
            self.owned = Owned::take(&self.owned.path)?;
        }
        let folder = &self.owned.path;
        let pins = self.maps.iter_mut().chain(self.links.iter_mut().map(|l| &mut l.link));
        for pin in pins.filter(|pin| !pin.is_in(folder)) {
            pin.put_into(folder).map_err(|source| OpenError::Kernel { what: "pin again", source })?;
            mended.pins += 1;
        }
        let mut detached = Vec::new();
        for l in &self.links {
            let is = attached_program(l.link.object.as_fd());
            let is = is.map_err(|source| OpenError::Kernel { what: "ask for a link", source })?;
            let (_, ours) = self.program(l.hook);
            if is != Some(ours) {
                detached.push((l.hook, l.device, is.is_some()));
            }
        }
        if detached.is_empty() {
            return Ok(mended);
        }
        let present = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
        let is_there = |device: u32| present.iter().any(|d| d.index == device);
        let gone: Vec<_> = self.devices().into_iter().filter(|d| !is_there(*d)).collect();
        mended.gone = gone.iter().map(|device| self.name(*device)).collect();
        gone.iter().try_for_each(|device| self.detach(*device))?;
        detached.retain(|(_, device, _)| is_there(*device));
        if !detached.is_empty() {
            mistrust().map_err(|source| OpenError::Kernel { what: "records of legs", source })?;
            self.attach_again(&detached, &present)?;
        }
        let is_mended = |d: &&Device| detached.iter().any(|(_, device, _)| *device == d.index);
        self.watch(&present)?;
        mended.devices = present.iter().filter(is_mended).map(|d| d.name.clone()).collect();
        Ok(mended)
    }

    /// Returns the indices of the attached devices.
    pub fn devices(&self) -> Vec<u32> {
        self.links.iter().filter(|l| l.hook == Hook::Ingress).map(|l| l.device).collect()
    }

    /// Attaches to another device. `early`: with XDP too.
    pub fn attach(&mut self, device: &Device, early: bool) -> Result<(), OpenError> {
        refuse_others(slice::from_ref(device), &self.owned.path)?;
        let device = device.index;
        let hooks = if early { &Hook::ALL[..] } else { &[Hook::Ingress, Hook::Egress] };
        for hook in hooks {
            let attached = attach(*hook, self.program(*hook).0, device, &self.owned.path);
            let link = attached.or_else(|e| self.detach(device).and(Err(e)))?;
            let link = Pin::of(hook.pin(device), link, &self.owned.path);
            self.links.push(AttachedProgram { hook: *hook, device, link });
        }
        Ok(())
    }

    /// Returns the name of an attached device, also of one that is gone.
    pub fn name(&self, device: u32) -> String {
        self.names.get(&device).cloned().unwrap_or_else(|| format!("device number {device}"))
    }

    /// Updates the guard and the names. Call it whenever devices have come, gone or got new names. `all`: all present devices.
    pub fn watch(&mut self, all: &[Device]) -> Result<(), OpenError> {
        let devices = self.devices();
        self.names.retain(|device, _| devices.contains(device));
        self.names.extend(all.iter().filter(|d| devices.contains(&d.index)).map(|d| (d.index, d.name.clone())));
        let Some(guard) = &mut self.guard else { return Ok(()) };
        guard.watch(&devices, all).map_err(|source| OpenError::Kernel { what: "attach to netfilter", source })
    }

    /// Detaches from a device, if it is attached.
    pub fn detach(&mut self, device: u32) -> Result<(), OpenError> {
        let failed = |source| OpenError::Kernel { what: "remove a link", source };
        let of_it = self.links.extract_if(.., |l| l.device == device);
        of_it.map(|l| l.link.name).try_for_each(|name| remove(&self.owned.path.join(name)).map_err(failed))
    }

    fn program(&self, hook: Hook) -> (BorrowedFd<'_>, u32) {
        let (program, id) = &self.programs[hook as usize];
        (program.as_fd(), *id)
    }

    /// Attaches again. For each link: hook, device, and whether it has another program (true) or none.
    fn attach_again(&mut self, detached: &[(Hook, u32, bool)], present: &[Device]) -> Result<(), OpenError> {
        let failed = |source| OpenError::Kernel { what: "attach again", source };
        let folder = self.owned.path.clone();
        refuse_others(present, &folder)?;
        for (hook, device, replaced) in detached {
            let (program, _) = &self.programs[*hook as usize];
            let is_it = |l: &&mut AttachedProgram| (l.hook, l.device) == (*hook, *device);
            let Some(AttachedProgram { link, .. }) = self.links.iter_mut().find(is_it) else { continue };
            if *replaced {
                replace(link.object.as_fd(), program.as_fd()).map_err(failed)?;
            } else {
                link.object = create(*hook, Place::Inside, program.as_fd(), *device).map_err(failed)?;
                link.put_into(&folder).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Removes all pins. When this process closes its descriptors, everything is detached.
    pub fn remove(self) -> io::Result<()> {
        self.owned.remove()
    }
}
