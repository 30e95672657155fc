//! Taps: copies of everything that passes through a leg ([`Tap`]), put together
//! from what control mode copies and from the ring of forwarded data ([`TapRing`]).

mod stretches;
mod tap;

pub(crate) use stretches::{Begin, TapRing};
pub use tap::{Piece, PieceKind, Tap, TapCounts, TapDirection, TapReader, Taps};
