//! Who answers the SYN of a client, and when its server is connected to.

use super::{
    ConfigError, PlugHandshake,
    file::{Listener, Name},
    source::SourceFile,
};
use longsplice_engine::{SpliceWhen, TpotHandshake, TpotWhose};
use serde::Deserialize;
use std::ops::Range;

/// The first two are those of plugs, the others those of intercepted connections.
#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RawHandshake {
    Proxy,
    EndToEnd,
    Basic,
    Pipelined,
    Confirm,
}

impl SourceFile<'_> {
    /// Returns the handshakes of a plug, and of intercepted connections.
    pub(super) fn handshake(
        &self,
        raw: &Listener,
        whose: Option<TpotWhose>,
    ) -> Result<(PlugHandshake, TpotHandshake), ConfigError> {
        let Some(handshake) = &raw.handshake else { return Ok(Default::default()) };
        let (of_plug, of_tpot) = match handshake.get_ref() {
            RawHandshake::Proxy => (Some(PlugHandshake::Proxy), None),
            RawHandshake::EndToEnd => (Some(PlugHandshake::EndToEnd), None),
            RawHandshake::Basic => (None, Some(TpotHandshake::Basic)),
            RawHandshake::Pipelined => (None, Some(TpotHandshake::Pipelined)),
            RawHandshake::Confirm => (None, Some(TpotHandshake::Confirm)),
        };
        let early = of_tpot.is_some_and(|handshake| handshake != TpotHandshake::Basic);
        let header = raw.proxy_protocol.as_ref().filter(|p| p.get_ref().is_received());
        let cure = match raw.protocol {
            Name::Plug if of_plug.is_some() && whose.is_none() => {
                return Ok((of_plug.unwrap_or_default(), TpotHandshake::Basic));
            }
            Name::Plug if whose.is_none() => "a plug's handshake is \"proxy\" or \"end-to-end\"",
            _ if whose.is_none() => {
                "only plugs and intercepted connections know the server before the client's SYN: remove the key, \
                 or use protocol = \"plug\" or \"tpot\""
            }
            _ if of_tpot.is_none() => {
                "the handshake of intercepted connections is \"basic\", \"pipelined\" or \"confirm\""
            }
            Name::Plug if early && (raw.target.is_some() || raw.pool.is_some()) => {
                "only the server that the client wants is connected to on its SYN: remove `target`, or the handshake"
            }
            Name::Tpot | Name::Plug if early && header.is_some() => {
                "the server is connected to before the client's PROXY header is read: remove `from`, or use \
                 handshake = \"basic\""
            }
            Name::Tpot | Name::Plug => return Ok((PlugHandshake::default(), of_tpot.unwrap_or_default())),
            _ if early => {
                "the rules need what the client sends after its handshake: remove the key, or use inside = \"bytes\""
            }
            _ => return Ok(Default::default()),
        };
        Err(self.wrong(handshake.span(), cure))
    }

    /// Checks when the connections of a plug are spliced whose clients shake hands with the target.
    pub(super) fn at_once(&self, at: Range<usize>, when: SpliceWhen) -> Result<(), ConfigError> {
        match when {
            SpliceWhen::AtOnce => {}
            SpliceWhen::Never => {
                let cure = "such connections are there to be spliced: remove splice = \"never\", or the handshake";
                return Err(self.wrong(at, cure));
            }
            _ => {
                self.warn(at, "the first bytes of these connections are copied: add policy = { splice = \"at-once\" }");
            }
        }
        Ok(())
    }
}
