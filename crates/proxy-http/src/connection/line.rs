//! What the access log tells of a request.

use longsplice_http::{Form, Request, Version};
use longsplice_proxy::log::access_log::{Extra, Wants, cut};

/// Most bytes of a path and of a referrer in the log, and of a user agent. More does not help to tell requests apart, and lines wait
/// in memory.
const MOST: usize = 1024;
const MOST_OF_AGENT: usize = 512;

/// Returns what the log wants of a request besides.
pub(super) fn extra_of(request: &Request, wanted: Wants) -> Option<Box<Extra>> {
    if !wanted.any() {
        return None;
    }
    let field = |name, is_wanted: bool| request.fields.all(name).next().filter(|value| is_wanted && !value.is_empty());
    let referrer = field("referer", wanted.referrer).map(|value| public(&String::from_utf8_lossy(value)));
    let agent = field("user-agent", wanted.user_agent).map(|value| String::from_utf8_lossy(value));
    let version = match request.version {
        Version::Http10 => "HTTP/1.0",
        Version::Http11 => "HTTP/1.1",
    };
    Some(Box::new(Extra {
        version: wanted.version.then_some(version.into()),
        referrer: referrer.map(|referrer| cut(&referrer, MOST)),
        user_agent: agent.map(|agent| cut(&agent, MOST_OF_AGENT)),
        is_absolute: matches!(request.form, Form::Absolute(..)),
    }))
}

/// Returns a URL without what may be secret: query, fragment, name and password.
fn public(url: &str) -> String {
    let url = &url[..url.find(['?', '#']).unwrap_or(url.len())];
    let Some((scheme, rest)) = url.split_once("//") else { return url.to_owned() };
    let end = rest.find('/').unwrap_or(rest.len());
    let host = rest[..end].rfind('@').map_or(0, |at| at + 1);
    format!("{scheme}//{}", &rest[host..])
}

/// Returns the path of a request for the log, without the query.
pub(super) fn path_of(request: &Request) -> Option<String> {
    let whole = match &request.form {
        Form::Origin(path) | Form::Absolute(_, path) => path,
        Form::Asterisk => "*",
        Form::Authority(_) => return None,
    };
    let path = whole.split_once('?').map_or(whole, |(path, _)| path);
    Some(cut(path, MOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &str) -> Request {
        Request::parse(format!("GET /a?b=c HTTP/1.0\r\nHost: a\r\n{fields}\r\n").as_bytes()).unwrap()
    }

    #[test]
    fn what_is_secret_is_left_out() {
        for (url, logged) in [
            ("http://a/b", "http://a/b"),
            ("https://ann:pw@a:8443/b/c@d?token=x#y", "https://a:8443/b/c@d"),
            ("http://ann@b@a", "http://a"),
            ("http://a#?", "http://a"),
            ("/b//c?d", "/b//c"),
            ("//ann:pw@a/", "//a/"),
            ("?x", ""),
            ("about:blank", "about:blank"),
        ] {
            assert_eq!(public(url), logged, "{url}");
        }
    }

    #[test]
    fn only_what_is_wanted_is_noted_and_not_without_end() {
        let all = Wants { version: true, referrer: true, user_agent: true };
        let long = request(&format!("Referer: /{}\r\nUser-Agent: {}\r\n", "\u{fc}".repeat(2000), "a\"".repeat(2000)));
        assert_eq!(extra_of(&long, Wants::default()), None);
        let extra = extra_of(&long, all).unwrap();
        let [referrer, agent] = [extra.referrer, extra.user_agent].map(Option::unwrap);
        assert!([&referrer, &agent].iter().all(|text| text.capacity() == text.len()), "they may stay for days");
        let [referrer, agent] = [referrer, agent].map(|text| text.len());
        assert_eq!((referrer, agent, extra.version.as_deref()), (MOST + 1, MOST_OF_AGENT, Some("HTTP/1.0")));
        let few = request("Referer:\r\nUser-Agent: \u{ff}\r\nUser-Agent: b\r\n");
        let extra = extra_of(&few, Wants { version: false, ..all }).unwrap();
        assert_eq!((extra.version, extra.referrer), (None, None));
        assert_eq!(path_of(&few).unwrap(), "/a");
    }
}
