//! Which address families a test runs with that can run with each.

use longsplice_lab::Family;
use std::{env, thread};

/// One family, which the last letter of the test's name selects, as .config/nextest.toml does where each family is a case. Those in
/// `SCENARIO_FAMILIES`, if it is set: `make test-all` sets `all`. To be called by the thread of the test, which has its name.
pub fn families() -> Vec<Family> {
    chosen(env::var("SCENARIO_FAMILIES").ok().as_deref(), thread::current().name())
}

fn chosen(told: Option<&str>, test: Option<&str>) -> Vec<Family> {
    let named = |family: &Family| told.is_some_and(|all| all.split(',').any(|one| one == format!("{family:?}")));
    match (told, test.filter(|name| name.contains("::")).and_then(|name| name.chars().last())) {
        (None, Some('a'..='l')) => vec![Family::V4],
        (None, Some(_)) => vec![Family::V6],
        _ if Family::BOTH.iter().any(named) => Family::BOTH.into_iter().filter(named).collect(),
        _ => Family::BOTH.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_family_is_that_of_the_name() {
        for (told, test, want) in [
            (None, Some("a::resets_pass"), vec![Family::V6]),
            (None, Some("a::released"), vec![Family::V4]),
            (Some("all"), Some("a::released"), Family::BOTH.into()),
            (Some("V6"), Some("a::released"), vec![Family::V6]),
            (Some("V4ToV6"), Some("a::released"), Family::BOTH.into()),
            (None, Some("main"), Family::BOTH.into()),
            (None, None, Family::BOTH.into()),
        ] {
            assert_eq!(chosen(told, test), want, "{told:?} {test:?}");
        }
    }
}
