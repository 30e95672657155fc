//! What the process holds of its data path: the lock of the folder, and descriptors of all that is pinned there. So whatever is
//! removed from the folder is still there, and what was detached can be attached again.

use crate::{
    OpenError,
    attach::{Hook, attached_program, create, replace},
    devices::devices,
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
}

impl Held {
    /// All that is pinned and attached.
    pub fn new(
        owned: Owned,
        programs: [OwnedFd; 3],
        maps: Vec<(String, OwnedFd)>,
        links: Vec<(Hook, u32, OwnedFd)>,
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
        Ok(Held { owned, programs: [a?, b?, c?], maps, links })
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
        for (i, l) in self.links.iter().enumerate() {
            let is = attached_program(l.link.object.as_fd());
            let is = is.map_err(|source| OpenError::Kernel { what: "ask for a link", source })?;
            let (_, ours) = self.program(l.hook);
            if is != Some(ours) {
                detached.push((i, is.is_some()));
            }
        }
        if !detached.is_empty() {
            mistrust().map_err(|source| OpenError::Kernel { what: "records of legs", source })?;
            self.attach_again(&detached, &mut mended)?;
        }
        Ok(mended)
    }

    fn program(&self, hook: Hook) -> (BorrowedFd<'_>, u32) {
        let (program, id) = &self.programs[hook as usize];
        (program.as_fd(), *id)
    }

    /// Links by their places; whether they have another program, or none.
    fn attach_again(&mut self, detached: &[(usize, bool)], mended: &mut Mended) -> Result<(), OpenError> {
        let present = devices().map_err(|source| OpenError::Kernel { what: "list devices", source })?;
        let failed = |source| OpenError::Kernel { what: "attach again", source };
        let folder = self.owned.path.clone();
        let is_there = |device: u32| present.iter().any(|d| d.index == device);
        let devices: Vec<_> = detached.iter().map(|(i, _)| self.links[*i].device).filter(|d| is_there(*d)).collect();
        refuse_others(&devices, &folder)?;
        for (i, replaced) in detached {
            let Attached { hook, device, ref link } = self.links[*i];
            let Some(is) = present.iter().find(|d| d.index == device) else {
                mended.gone.extend((!mended.gone.contains(&device)).then_some(device));
                remove(&folder.join(&link.name)).map_err(failed)?;
                continue;
            };
            let (program, _) = self.program(hook);
            if *replaced {
                replace(link.object.as_fd(), program).map_err(failed)?;
            } else {
                let object = create(hook, program, device).map_err(failed)?;
                let link = &mut self.links[*i].link;
                link.object = object;
                link.put_into(&folder).map_err(failed)?;
            }
            mended.devices.extend((!mended.devices.contains(&is.name)).then(|| is.name.clone()));
        }
        self.links.retain(|l| !mended.gone.contains(&l.device));
        Ok(())
    }

    /// Removes all that is pinned; with what this process holds of it, all that is attached.
    pub fn remove(self) -> io::Result<()> {
        self.owned.remove()
    }
}
