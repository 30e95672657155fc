//! Tables of the TOML file that are read key by key, straight into the value that they configure. So that value alone has
//! the fields and their defaults. Tables with keys that must be there have types of their own.

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, MapAccess, Visitor},
};
use std::{fmt, marker::PhantomData};

/// A value whose fields are set by the keys of a table. Fields whose keys are left out keep their defaults.
pub(super) trait Keys: Default {
    /// The keys: an enum with serde's `field_identifier`, so that other keys are refused at their position.
    type Key: DeserializeOwned;

    /// Sets the field of this key to its value, which is the next one in `table`.
    fn set<'de, A: MapAccess<'de>>(&mut self, key: Self::Key, table: &mut A) -> Result<(), A::Error>;
}

/// A table with such keys.
#[derive(Default)]
pub(super) struct Table<T>(pub(super) T);

impl<'de, T: Keys> Deserialize<'de> for Table<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V<T>(PhantomData<T>);
        impl<'de, T: Keys> Visitor<'de> for V<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut table: A) -> Result<T, A::Error> {
                let mut value = T::default();
                while let Some(key) = table.next_key()? {
                    value.set(key, &mut table)?;
                }
                Ok(value)
            }
        }
        d.deserialize_map(V(PhantomData)).map(Table)
    }
}
