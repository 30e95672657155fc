//! What has to be there before a server starts.

use longsplice_proxy::{Config, Prepared, StartError};
use std::path::Path;

fn at_start(more: &str) -> Config {
    let text = format!("[[listener]]\nprotocol = \"http\"\nlisten = \"127.0.0.1:0\"\n{more}");
    Config::from_toml(&text, Path::new("/etc/l.toml")).unwrap()
}

#[test]
fn a_cache_that_cannot_be_kept_has_a_place() {
    let e = Prepared::new(at_start("cache = { dir = \"/proc/cache\" }"), crate::SERVICES).err().unwrap().to_string();
    assert!(e.starts_with("/etc/l.toml:4:9: cannot keep a cache in /proc/cache: "), "{e}");
}

#[tokio::test]
async fn a_program_without_http_does_not_start_for_it() {
    let e = Prepared::new(at_start(""), &[]).err().unwrap();
    assert!(matches!(e, StartError::NotServed("http")), "{e}");
    assert!(Prepared::new(at_start(""), crate::SERVICES).is_ok());
}
