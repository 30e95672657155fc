//! What a SOCKS listener serves, from the TOML file.

use super::{
    ConfigError,
    source::SourceFile,
    table::{Keys, Table},
    value::{Count, Many, OrNumber, Seconds},
};
use crate::commands::{Bind, Command, Commands, Udp};
use serde::{Deserialize, de::MapAccess};
use std::ops::Range;
use toml::Spanned;

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum BindKey {
    Wait,
    AnyPeer,
    Ports,
    PerClient,
}

impl Keys for Bind {
    type Key = BindKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: BindKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            BindKey::Wait => self.wait = table.next_value::<Seconds>()?.0,
            BindKey::AnyPeer => self.any_peer = table.next_value()?,
            BindKey::Ports => self.ports = Some(table.next_value::<OrNumber<_>>()?.0),
            BindKey::PerClient => self.per_client = table.next_value::<Count>()?.0,
        }
        Ok(())
    }
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
pub(super) enum UdpKey {
    IdleLimit,
    Replies,
    Destinations,
    Ports,
    PerClient,
}

impl Keys for Udp {
    type Key = UdpKey;

    fn set<'de, A: MapAccess<'de>>(&mut self, key: UdpKey, table: &mut A) -> Result<(), A::Error> {
        match key {
            UdpKey::IdleLimit => self.idle_limit = table.next_value::<Seconds>()?.0,
            UdpKey::Replies => self.replies = table.next_value()?,
            UdpKey::Destinations => self.destinations = table.next_value::<Count>()?.0,
            UdpKey::Ports => self.ports = Some(table.next_value::<OrNumber<_>>()?.0),
            UdpKey::PerClient => self.per_client = table.next_value::<Count>()?.0,
        }
        Ok(())
    }
}

/// The keys of a listener that only SOCKS has.
pub(super) struct RawCommands {
    pub commands: Option<Spanned<Many<Command>>>,
    pub bind: Option<Spanned<Table<Bind>>>,
    pub udp: Option<Spanned<Table<Udp>>>,
}

impl RawCommands {
    /// Returns where the first one stands.
    pub fn span(&self) -> Option<Range<usize>> {
        let RawCommands { commands, bind, udp } = self;
        let all =
            [commands.as_ref().map(Spanned::span), bind.as_ref().map(Spanned::span), udp.as_ref().map(Spanned::span)];
        all.into_iter().flatten().next()
    }
}

impl SourceFile<'_> {
    /// Returns what is served. `tapped`: copies of everything are wanted, and datagrams are not copied.
    pub(super) fn commands(&self, raw: RawCommands, tapped: bool) -> Result<Commands, ConfigError> {
        let mut commands = Commands::default();
        let mut spans = (raw.bind.as_ref().map(Spanned::span), raw.udp.as_ref().map(Spanned::span));
        if tapped {
            commands.served.retain(|command| *command != Command::UdpAssociate);
        }
        if let Some(named) = raw.commands {
            let (at, Many(named)) = (named.span(), named.into_inner());
            if tapped && named.contains(&Command::UdpAssociate) {
                let cure =
                    "a tap copies everything, and datagrams are not copied: remove \"udp-associate\", or the tap";
                return Err(self.wrong(at, cure));
            }
            commands.served = named;
        }
        let of = [(Command::Bind, spans.0.take()), (Command::UdpAssociate, spans.1.take())];
        for (command, at) in of {
            if let Some(at) = at.filter(|_| !commands.serves(command)) {
                self.warn(at, &format!("this has no effect: `commands` does not serve \"{}\"", command.as_str()));
            }
        }
        commands.bind = raw.bind.map_or_else(Bind::default, |bind| bind.into_inner().0);
        commands.udp = raw.udp.map_or_else(Udp::default, |udp| udp.into_inner().0);
        Ok(commands)
    }
}
