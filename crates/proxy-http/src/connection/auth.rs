//! Basic authentication (RFC 7617): in `Proxy-Authorization` for a proxy, and in `Authorization` for a site.

use base64::{Engine, engine::general_purpose::STANDARD};
use longsplice_http::Fields;
use longsplice_proxy::{
    fault::Fault,
    users::{Credentials, NoUser, Users},
};
use std::net::IpAddr;

/// Value of `Proxy-Authenticate` and of `WWW-Authenticate`.
pub(crate) const CHALLENGE: &str = "Basic realm=\"longsplice\", charset=\"UTF-8\"";
/// Maximum length in bytes of a value that can be valid: 511 bytes in base64, and the name of the scheme.
const LONGEST: usize = 1024;

/// Returns the user that this field authenticates; `None` if authentication is not required. `asking`: the status that asks for a
/// password.
pub(crate) async fn authenticate(
    fields: &Fields,
    (field, asking): (&str, u16),
    users: &Users,
    client: IpAddr,
) -> Result<Option<String>, (Fault, u16)> {
    if users.is_empty() {
        return Ok(None);
    }
    let fail = |user: Option<String>, why| Err((Fault::AuthFailed { user, why }, asking));
    let mut given = fields.all(field);
    let given = match (given.next(), given.next()) {
        (Some(value), None) => value,
        (None, _) => return fail(None, "no name and password"),
        (Some(_), Some(_)) => return fail(None, "more than one name and password"),
    };
    let Some(credentials) = basic(given) else { return fail(None, "no Basic name and password") };
    match users.check_of(client, &credentials).await {
        Ok(user) => Ok(Some(user)),
        Err(no @ NoUser::Wrong) => fail(Some(String::from_utf8_lossy(&credentials.name).into_owned()), no.why()),
        Err(no @ NoUser::TooMany) => Err((Fault::AuthFailed { user: None, why: no.why() }, 429)),
    }
}

/// Parses `Basic base64(NAME:PASSWORD)`.
fn basic(value: &[u8]) -> Option<Credentials> {
    let space = value.iter().position(|b| *b == b' ').filter(|_| value.len() <= LONGEST)?;
    let (scheme, token) = value.split_at(space);
    if !scheme.eq_ignore_ascii_case(b"basic") {
        return None;
    }
    let pair = STANDARD.decode(token.trim_ascii()).ok()?;
    let colon = pair.iter().position(|b| *b == b':')?;
    Some(Credentials { name: pair[..colon].to_vec(), password: pair[colon + 1..].to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_passwords() {
        let read = |v: &str| basic(v.as_bytes()).map(|c| (c.name.clone(), c.password.clone()));
        let ann = Some((b"ann".to_vec(), b"s:t".to_vec()));
        assert_eq!(read("Basic YW5uOnM6dA=="), ann);
        assert_eq!(read("bAsIc   YW5uOnM6dA=="), ann);
        assert_eq!(read("Basic Og=="), Some((vec![], vec![])));
        for no in ["", "Basic", "Basic YW5u", "Basic YW5uOnM6dA", "Basic YW5uO*", "Digest YW5uOnM6dA==", "YW5uOnM6dA=="]
        {
            assert_eq!(read(no), None, "{no}");
        }
        assert_eq!(read(&format!("Basic {}", "YW5u".repeat(300))), None);
    }
}
