//! Values of the TOML file, checked while they are parsed. Their errors say what to write instead.

use crate::access::Action;
use longsplice_engine::SpliceWhen;
use serde::{
    Deserialize, Deserializer,
    de::{self, IntoDeserializer, SeqAccess, Visitor},
};
use std::{
    fmt::{self, Display},
    marker::PhantomData,
    str::FromStr,
    time::Duration,
};

/// A value parsed from a string.
pub(super) struct Parsed<T>(pub(super) T);

/// A value parsed from a string, or from the digits of a number.
pub(super) struct OrNumber<T>(pub(super) T);

/// Parses within the visitor: only errors from there have the span of an element of a list.
struct ParseVisitor<T> {
    numbers: bool,
    of: PhantomData<T>,
}

impl<T: FromStr<Err: Display>> Visitor<'_> for ParseVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.numbers { "a number or a string" } else { "a string" })
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(de::Error::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        if !self.numbers {
            return Err(de::Error::invalid_type(de::Unexpected::Signed(number), &self));
        }
        self.visit_str(&number.to_string())
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for Parsed<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ParseVisitor { numbers: false, of: PhantomData }).map(Parsed)
    }
}

impl<'de, T: FromStr<Err: Display>> Deserialize<'de> for OrNumber<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(ParseVisitor { numbers: true, of: PhantomData }).map(OrNumber)
    }
}

/// A list, or a single value instead of a list of one.
pub(super) struct Many<T>(pub(super) Vec<T>);

impl<T> Default for Many<T> {
    fn default() -> Self {
        Many(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Many<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for V<T> {
            type Value = Vec<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value or a list of values")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<T>, E> {
                Ok(vec![T::deserialize(text.into_deserializer())?])
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Vec<T>, E> {
                Ok(vec![T::deserialize(number.into_deserializer())?])
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = seq.next_element()? {
                    all.push(one);
                }
                if all.is_empty() {
                    // An empty list could mean all or none, so it is an error.
                    return Err(de::Error::custom("empty list: write something into it, or leave the key out"));
                }
                Ok(all)
            }
        }
        d.deserialize_any(V(PhantomData)).map(Many)
    }
}

/// A duration in seconds.
pub(super) struct Seconds(pub(super) Duration);
/// A duration in seconds, or `"never"`.
pub(super) struct SecondsOrNever(pub(super) Option<Duration>);

/// Maximum duration in seconds, ten years: more is a mistake, and would overflow somewhere.
const SECONDS_MAX: f64 = 10.0 * 366.0 * 86400.0;

struct SecondsVisitor {
    never: bool,
}

impl Visitor<'_> for SecondsVisitor {
    type Value = Option<Duration>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of seconds above 0, ten years at most, such as 10 or 2.5")?;
        f.write_str(if self.never { ", or \"never\"" } else { "" })
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers that large are refused")]
    fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<Option<Duration>, E> {
        self.visit_f64(seconds as f64)
    }

    fn visit_f64<E: de::Error>(self, seconds: f64) -> Result<Option<Duration>, E> {
        if seconds > 0.0 && seconds <= SECONDS_MAX {
            Ok(Some(Duration::from_secs_f64(seconds)))
        } else {
            Err(de::Error::invalid_value(de::Unexpected::Float(seconds), &self))
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Option<Duration>, E> {
        if self.never && text == "never" {
            Ok(None)
        } else {
            Err(de::Error::invalid_value(de::Unexpected::Str(text), &self))
        }
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let seconds = d.deserialize_any(SecondsVisitor { never: false })?;
        seconds.map(Seconds).ok_or_else(|| de::Error::custom("a number of seconds is expected"))
    }
}

impl<'de> Deserialize<'de> for SecondsOrNever {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_any(SecondsVisitor { never: true }).map(SecondsOrNever)
    }
}

/// A duration in whole seconds, from 1 to 32767, which is the most that the kernel takes for probes (TCP_KEEPIDLE).
pub(super) struct Keepalive(pub(super) Duration);

impl<'de> Deserialize<'de> for Keepalive {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Duration;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of whole seconds from 1 to 32767")
            }
            fn visit_i64<E: de::Error>(self, seconds: i64) -> Result<Duration, E> {
                let fits = u16::try_from(seconds).ok().filter(|s| (1..=32767).contains(s));
                let wrong = || de::Error::invalid_value(de::Unexpected::Signed(seconds), &self);
                fits.map(|s| Duration::from_secs(s.into())).ok_or_else(wrong)
            }
        }
        d.deserialize_any(V).map(Keepalive)
    }
}

/// A limit in number. None may be 0: that would serve nobody.
pub(super) struct Count(pub(super) u32);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = u32;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number from 1 to 4294967295")
            }
            fn visit_i64<E: de::Error>(self, n: i64) -> Result<u32, E> {
                let wrong = || de::Error::invalid_value(de::Unexpected::Signed(n), &self);
                u32::try_from(n).ok().filter(|n| *n > 0).ok_or_else(wrong)
            }
        }
        d.deserialize_any(V).map(Count)
    }
}

/// A list of tables. A single table is a mistake that is easy to make: `[listener]`.
pub(super) struct Tables<T>(pub(super) Vec<T>);

impl<T> Default for Tables<T> {
    fn default() -> Self {
        Tables(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Tables<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for V<T> {
            type Value = Vec<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of tables: write [[NAME]] with two brackets, or NAME = [{ ... }]")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = seq.next_element()? {
                    all.push(one);
                }
                Ok(all)
            }
        }
        d.deserialize_any(V(PhantomData)).map(Tables)
    }
}

/// Name of a listener. It stands in lines of logs.
pub(super) struct ListenerName(pub(super) String);

impl FromStr for ListenerName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let good =
            (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:[]".contains(&b));
        let cure = "bad name: write letters, digits, '-', '_', '.', ':', '[' and ']', 64 at most";
        if good { Ok(ListenerName(text.into())) } else { Err(cure) }
    }
}

/// The policy key `splice`.
pub(super) struct Splice(pub(super) SpliceWhen);

impl<'de> Deserialize<'de> for Splice {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = SpliceWhen;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", \"never\", \"at-once\" or a number of bytes")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<SpliceWhen, E> {
                match text {
                    "auto" => Ok(SpliceWhen::Auto),
                    "never" => Ok(SpliceWhen::Never),
                    "at-once" => Ok(SpliceWhen::AtOnce),
                    other => Err(de::Error::invalid_value(de::Unexpected::Str(other), &self)),
                }
            }
            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<SpliceWhen, E> {
                let negative = |_| de::Error::invalid_value(de::Unexpected::Signed(bytes), &self);
                u64::try_from(bytes).map(SpliceWhen::AfterBytes).map_err(negative)
            }
        }
        d.deserialize_any(V).map(Splice)
    }
}

/// Action of a rule.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RawAction {
    Allow,
    Deny,
}

impl From<RawAction> for Action {
    fn from(raw: RawAction) -> Action {
        match raw {
            RawAction::Allow => Action::Allow,
            RawAction::Deny => Action::Deny,
        }
    }
}
