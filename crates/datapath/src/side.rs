//! The two sides of a flow, and values that exist once per side.
//!
//! What belongs to one side belongs to the leg of that host. A direction is named by the host that sends in
//! it: of a value that exists per direction, `x[Side::Client]` is the one of client to server.

use std::{
    array,
    ops::{Index, IndexMut},
};

/// One of the two hosts of a flow. Stands for its leg, and for the direction in which it sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Side {
    /// The host that opened the connection to the proxy.
    Client,
    /// The host to which the proxy connected.
    Server,
}

impl Side {
    /// Both sides, the client first.
    pub const BOTH: [Side; 2] = [Side::Client, Side::Server];

    /// Returns the opposite side: the receiver of what this side sends.
    #[must_use]
    pub const fn other(self) -> Side {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

/// One value for each side of a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Pair<T> {
    /// The client's value; per direction, the one of client to server.
    pub client: T,
    /// The server's value; per direction, the one of server to client.
    pub server: T,
}

impl<T> Pair<T> {
    /// Creates a pair of different values.
    pub const fn new(client: T, server: T) -> Pair<T> {
        Pair { client, server }
    }

    /// Creates a pair of equal values.
    pub const fn both(value: T) -> Pair<T>
    where
        T: Copy,
    {
        Pair { client: value, server: value }
    }

    /// Creates a pair by calling `f` with each side, the client's first.
    pub fn from_fn(mut f: impl FnMut(Side) -> T) -> Pair<T> {
        Pair { client: f(Side::Client), server: f(Side::Server) }
    }

    /// Borrows both values.
    pub const fn each_ref(&self) -> Pair<&T> {
        Pair { client: &self.client, server: &self.server }
    }

    /// Borrows both values mutably.
    pub const fn each_mut(&mut self) -> Pair<&mut T> {
        Pair { client: &mut self.client, server: &mut self.server }
    }

    /// Converts both values, the client's first.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Pair<U> {
        Pair { client: f(self.client), server: f(self.server) }
    }

    /// Joins the values of each side.
    pub fn zip<U>(self, other: Pair<U>) -> Pair<(T, U)> {
        Pair { client: (self.client, other.client), server: (self.server, other.server) }
    }

    /// Gives each side the other's value.
    #[must_use]
    pub fn swapped(self) -> Pair<T> {
        Pair { client: self.server, server: self.client }
    }

    /// Visits both values, the client's first.
    pub fn iter(&self) -> array::IntoIter<&T, 2> {
        self.each_ref().into_iter()
    }

    /// Visits both values mutably, the client's first.
    pub fn iter_mut(&mut self) -> array::IntoIter<&mut T, 2> {
        self.each_mut().into_iter()
    }
}

impl<T> Index<Side> for Pair<T> {
    type Output = T;

    fn index(&self, side: Side) -> &T {
        match side {
            Side::Client => &self.client,
            Side::Server => &self.server,
        }
    }
}

impl<T> IndexMut<Side> for Pair<T> {
    fn index_mut(&mut self, side: Side) -> &mut T {
        match side {
            Side::Client => &mut self.client,
            Side::Server => &mut self.server,
        }
    }
}

impl<T> IntoIterator for Pair<T> {
    type Item = T;
    type IntoIter = array::IntoIter<T, 2>;

    fn into_iter(self) -> Self::IntoIter {
        <[T; 2]>::from(self).into_iter()
    }
}

impl<'a, T> IntoIterator for &'a Pair<T> {
    type Item = &'a T;
    type IntoIter = array::IntoIter<&'a T, 2>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<'a, T> IntoIterator for &'a mut Pair<T> {
    type Item = &'a mut T;
    type IntoIter = array::IntoIter<&'a mut T, 2>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter_mut()
    }
}

/// The client's value is the first element.
impl<T> From<[T; 2]> for Pair<T> {
    fn from([client, server]: [T; 2]) -> Pair<T> {
        Pair { client, server }
    }
}

/// The client's value becomes the first element.
impl<T> From<Pair<T>> for [T; 2] {
    fn from(pair: Pair<T>) -> [T; 2] {
        [pair.client, pair.server]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_keep_their_values() {
        let mut pair = Pair::from_fn(|side| side);
        assert_eq!(pair, Pair::new(Side::Client, Side::Server));
        assert_eq!(Side::BOTH.map(|side| pair[side]), Side::BOTH);
        assert_eq!(pair.swapped(), pair.map(Side::other));
        assert_eq!(pair.zip(Pair::new(1, 2)), Pair::new((Side::Client, 1), (Side::Server, 2)));
        assert_eq!((Pair::from(Side::BOTH), <[Side; 2]>::from(pair)), (pair, Side::BOTH));
        assert!(pair.iter().eq(&Side::BOTH) && pair.into_iter().eq(Side::BOTH));
        pair[Side::Server] = Side::Client;
        assert_eq!(pair, Pair::both(Side::Client));
        pair.iter_mut().zip(Side::BOTH).for_each(|(value, side)| *value = side);
        *pair.each_mut().client = Side::Server;
        assert_eq!(pair, Pair::both(Side::Server));
        assert_eq!(size_of::<Pair<u64>>(), size_of::<[u64; 2]>());
    }
}
