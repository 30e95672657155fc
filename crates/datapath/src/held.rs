//! What the process holds of its data path: the lock of the folder, and descriptors of all that is pinned there. So whatever is
//! removed from the folder is still there, and what was detached can be attached again.

use crate::{
    OpenError,
    attach::{Hook, attach, attached_program, create, replace},
    devices::{Device, devices},
    guard::Guard,
    kernel::kernel,
    pins::{Owned, pin, refuse_others},
};
use libbpf_rs::Program;
use std::{
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::Path,
};

/// What had to be put right.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Pins that were gone. Without them nobody could have taken over.
    pub pins: usize,
    /// Devices from which programs were detached. Packets have passed there that the data path has not seen.
    pub devices: Vec<String>,
    /// Numbers of devices that are gone.
    pub gone: Vec<u32>,
}

/// An object of the kernel's with a name in the folder.
struct Pin {
    name: String,
    object: OwnedFd,
    /// Device and inode of that name.
    file: Option<(u64, u64)>,
}

impl Pin {
    /// One that is there.
    fn of(name: String, object: OwnedFd, folder: &Path) -> Pin {
        let file = identity(&folder.join(&name));
        Pin { name, object, file }
    }

    fn is_in(&self, folder: &Path) -> bool {
        self.file.is_some() && identity(&folder.join(&self.name)) == self.file
    }

    fn put_into(&mut self, folder: &Path) -> io::Result<()> {
        let path = folder.join(&self.name);
        remove(&path)?; // what somebody has put in its place
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

/// A program at a device.
struct Attached {
    hook: Hook,
    device: u32,
    link: Pin,
}

pub(crate) struct Held {
    owned: Owned,
    /// In the order of [`Hook::ALL`], each with its number.
    programs: [(OwnedFd, u32); 3],
    maps: Vec<Pin>,
    links: Vec<Attached>,
    /// None: the kernel has none.
    guard: Option<Guard>,
}

impl Held {
    /// All that is pinned and attached.
    pub fn new(
        owned: Owned,
        programs: [OwnedFd; 3],
        maps: Vec<(String, OwnedFd)>,
        links: Vec<(Hook, u32, OwnedFd)>,
        guard: Option<Guard>,
    ) -> Result<Held, OpenError> {
        let maps = maps.into_iter().map(|(name, map)| Pin::of(name, map, &owned.path)).collect();
        let links = links
            .into_iter()
            .map(|(hook, device, link)| Attached { hook, device, link: Pin::of(hook.pin(device), link, &owned.path) })
            .collect();
        let number = |program: OwnedFd| {
            let number = Program::id_from_fd(program.as_fd()).map_err(kernel("ask for a program"));
            number.map(|n| (program, n))
        };
        let [a, b, c] = programs.map(number);
        Ok(Held { owned, programs: [a?, b?, c?], maps, links, guard })
    }

    /// Looks whether all is as it was left, and puts it right: a handful of system calls if it is. `mistrust`: called before
    /// anything is attached again.
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
        mended.gone = self.devices().into_iter().filter(|d| !is_there(*d)).collect();
        mended.gone.iter().try_for_each(|device| self.detach(*device))?;
        detached.retain(|(_, device, _)| is_there(*device));
        if !detached.is_empty() {
            mistrust().map_err(|source| OpenError::Kernel { what: "records of legs", source })?;
            self.attach_again(&detached)?;
        }
        let is_mended = |d: &&Device| detached.iter().any(|(_, device, _)| *device == d.index);
        self.watch(&present)?;
        mended.devices = present.iter().filter(is_mended).map(|d| d.name.clone()).collect();
        Ok(mended)
    }

    /// Indices of the devices that are attached to.
    pub fn devices(&self) -> Vec<u32> {
        self.links.iter().filter(|l| l.hook == Hook::Ingress).map(|l| l.device).collect()
    }

    /// Attaches to another device. `early`: by XDP as well.
    pub fn attach(&mut self, device: u32, early: bool) -> Result<(), OpenError> {
        refuse_others(&[device], &self.owned.path)?;
        let hooks = if early { &Hook::ALL[..] } else { &[Hook::Ingress, Hook::Egress] };
        for hook in hooks {
            let attached = attach(*hook, self.program(*hook).0, device, &self.owned.path);
            let link = attached.or_else(|e| self.detach(device).and(Err(e)))?;
            let link = Pin::of(hook.pin(device), link, &self.owned.path);
            self.links.push(Attached { hook: *hook, device, link });
        }
        Ok(())
    }

    /// What passes by other devices is judged: whenever devices have come or gone, of which these are all.
    pub fn watch(&mut self, all: &[Device]) -> Result<(), OpenError> {
        let devices = self.devices();
        let Some(guard) = &mut self.guard else { return Ok(()) };
        guard.watch(&devices, all).map_err(|source| OpenError::Kernel { what: "attach to netfilter", source })
    }

    /// Detaches from a device, if it is there.
    pub fn detach(&mut self, device: u32) -> Result<(), OpenError> {
        let failed = |source| OpenError::Kernel { what: "remove a link", source };
        let of_it = self.links.extract_if(.., |l| l.device == device);
        of_it.map(|l| l.link.name).try_for_each(|name| remove(&self.owned.path.join(name)).map_err(failed))
    }

    fn program(&self, hook: Hook) -> (BorrowedFd<'_>, u32) {
        let (program, id) = &self.programs[hook as usize];
        (program.as_fd(), *id)
    }

    /// Links, and whether they have another program, or none.
    fn attach_again(&mut self, detached: &[(Hook, u32, bool)]) -> Result<(), OpenError> {
        let failed = |source| OpenError::Kernel { what: "attach again", source };
        let folder = self.owned.path.clone();
        let devices: Vec<_> = detached.iter().map(|(_, device, _)| *device).collect();
        refuse_others(&devices, &folder)?;
        for (hook, device, replaced) in detached {
            let (program, _) = &self.programs[*hook as usize];
            let is_it = |l: &&mut Attached| (l.hook, l.device) == (*hook, *device);
            let Some(Attached { link, .. }) = self.links.iter_mut().find(is_it) else { continue };
            if *replaced {
                replace(link.object.as_fd(), program.as_fd()).map_err(failed)?;
            } else {
                link.object = create(*hook, program.as_fd(), *device).map_err(failed)?;
                link.put_into(&folder).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Removes all that is pinned; with what this process holds of it, all that is attached.
    pub fn remove(self) -> io::Result<()> {
        self.owned.remove()
    }
}
