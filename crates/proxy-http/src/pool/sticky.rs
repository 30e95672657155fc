//! Cookies that keep a client at its server.

use super::{Member, Pool};
use longsplice_http::Request;
use sha2::{Digest, Sha256};

/// Returns the value that stands for a server. Nobody can tell from it which server that is, without the secret.
pub(super) fn token(secret: &str, pool: &str, server: &str) -> String {
    let mut hash = Sha256::new();
    for part in [secret, pool, server] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize()[..12].iter().map(|b| format!("{b:02x}")).collect()
}

impl Pool {
    /// Returns the index of the server that a request names in its cookie.
    pub(super) fn named(&self, request: &Request) -> Option<usize> {
        let mut values = request.fields.cookies(&self.config().sticky.as_ref()?.cookie);
        values.find_map(|value| self.members.iter().position(|m| m.token.as_bytes() == value))
    }

    /// Returns the value of Set-Cookie for the reply of this server; `None` if the client need not be told.
    pub fn cookie(&self, request: &Request, member: &Member) -> Option<String> {
        let sticky = self.config().sticky.as_ref().filter(|_| self.named(request) != Some(member.index))?;
        let mut cookie = format!("{}={}; Path=/; HttpOnly", sticky.cookie, member.token);
        if let Some(age) = sticky.max_age {
            cookie += &format!("; Max-Age={}", age.as_secs().max(1));
        }
        Some(cookie + if sticky.secure { "; Secure" } else { "" })
    }
}
