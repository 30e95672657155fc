//! Verifies passwords against slow hashes ([`hashes`](crate::users::hashes)), outside the threads that serve connections.
//!
//! HTTP clients send the password with each request, so a right password is remembered for a while, as
//! a digest of hash and password. Wrong ones are not remembered, so each guess takes its full time.

use crate::users::{cleared::Cleared, hashes::Hash};
use sha2::{Digest, Sha256};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use tokio::{sync::Semaphore, task::spawn_blocking};

/// Number of concurrent verifications: guesses must not occupy all processors.
const AT_ONCE: usize = 2;
/// Time for which a right password is remembered; a client sends it many times while a page loads.
const REMEMBER: Duration = Duration::from_secs(60);
/// Number of remembered passwords, enough for the simultaneously active clients of a listener; about 100 KB.
const REMEMBERED_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Verifier {
    running: Arc<Semaphore>,
    right: Mutex<HashMap<[u8; 32], Instant>>,
}

impl Default for Verifier {
    fn default() -> Verifier {
        Verifier { running: Arc::new(Semaphore::new(AT_ONCE)), right: Mutex::default() }
    }
}

impl Verifier {
    /// Whether the hash matches the password.
    pub async fn verify(&self, hash: &Hash, password: &[u8]) -> bool {
        // No hash contains a NUL, so the digest is unique to this pair.
        let key = Sha256::new().chain_update(&hash.text).chain_update([0]).chain_update(password).finalize().into();
        if self.remembers(&key) {
            return true;
        }
        let Ok(permit) = self.running.clone().acquire_owned().await else { return false };
        let (hash, password) = (hash.clone(), Cleared::from_vec(password.to_owned()));
        // Cannot be cancelled: it counts until it has really ended.
        let verified = spawn_blocking(move || {
            let verified = hash.verify(&password);
            drop(permit);
            verified
        });
        let right = match verified.await {
            Ok(Ok(right)) => right,
            Ok(Err(e)) => {
                tracing::error!("cannot verify a password: its user is refused: {e}");
                false
            }
            Err(e) => {
                tracing::error!("cannot verify a password: its user is refused: {e}");
                false
            }
        };
        if right {
            self.remember(key);
        }
        right
    }

    fn remembers(&self, key: &[u8; 32]) -> bool {
        let right = self.right.lock().unwrap_or_else(PoisonError::into_inner);
        right.get(key).is_some_and(|since| since.elapsed() < REMEMBER)
    }

    fn remember(&self, key: [u8; 32]) {
        let mut right = self.right.lock().unwrap_or_else(PoisonError::into_inner);
        if right.len() >= REMEMBERED_MAX {
            right.retain(|_, since| since.elapsed() < REMEMBER);
        }
        if right.len() < REMEMBERED_MAX {
            right.insert(key, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::users::{Credentials, Users};
    use std::{
        pin::pin,
        sync::mpsc,
        task::{Context, Poll, Waker},
    };

    fn poll<T>(check: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        check.poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Whoever goes away has not freed what his guess takes.
    #[test]
    fn few_are_verified_at_once_and_count_until_they_have_ended() {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.max_blocking_threads(1).build().unwrap().block_on(async {
            let (go_on, wait) = mpsc::channel();
            let busy = spawn_blocking(move || wait.recv());
            let verifier = Verifier::default();
            let hash = Hash::read(&bcrypt::hash("secret", 4).unwrap()).unwrap();
            for left in (0..AT_ONCE).rev().chain([0]) {
                assert!(poll(pin!(verifier.verify(&hash, b"guess"))).is_pending());
                assert_eq!(verifier.running.available_permits(), left);
            }
            go_on.send(()).unwrap();
            busy.await.unwrap().unwrap();
            let all = verifier.running.acquire_many(AT_ONCE as u32).await.unwrap();
            assert_eq!(all.num_permits(), AT_ONCE);
        });
    }

    /// Nobody learns from the time that it takes whether there is such a user.
    #[tokio::test]
    async fn a_name_that_nobody_has_takes_as_long() {
        let mut users = Users::default();
        users.add("ann", &bcrypt::hash("secret", 4).unwrap()).unwrap();
        let held = users.verifier.running.acquire_many(AT_ONCE as u32).await.unwrap();
        for name in ["ann", "nobody"] {
            let given = Credentials { name: name.into(), password: b"guess".to_vec() };
            let mut check = pin!(users.check(&given));
            assert!(poll(check.as_mut()).is_pending(), "{name} is not looked at");
        }
        drop(held);
    }

    #[tokio::test]
    async fn only_what_was_right_is_remembered_and_no_more_than_there_is_room_for() {
        let verifier = Verifier::default();
        let hash = Hash::read(&bcrypt::hash("secret", 4).unwrap()).unwrap();
        assert!(!verifier.verify(&hash, b"guess").await);
        assert!(verifier.right.lock().unwrap().is_empty());
        assert!(verifier.verify(&hash, b"secret").await);
        assert_eq!(verifier.right.lock().unwrap().len(), 1);
        // from memory: nothing can be computed any more
        verifier.running.close();
        assert!(verifier.verify(&hash, b"secret").await);
        assert!(!verifier.verify(&hash, b"guess").await);
        for n in 0..2 * REMEMBERED_MAX {
            verifier.remember(Sha256::digest(n.to_be_bytes()).into());
        }
        assert_eq!(verifier.right.lock().unwrap().len(), REMEMBERED_MAX);
    }
}
