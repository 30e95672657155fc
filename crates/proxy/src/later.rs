//! Values of a listener that later ones replace for all who hold them: the rules and users of live connections, if an operator
//! wants these to be judged again.

use std::{
    fmt,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

/// What is in force for all values of a listener that are older.
struct Line<T> {
    /// Number of the value from which on they hold for themselves.
    from: AtomicU64,
    value: RwLock<Option<Arc<T>>>,
}

/// A value that a later one may replace.
pub(crate) struct Later<T> {
    pub own: Arc<T>,
    number: u64,
    line: Option<Arc<Line<T>>>,
}

impl<T> Later<T> {
    pub fn new(own: T) -> Later<T> {
        Later { own: Arc::new(own), number: 0, line: None }
    }

    /// Returns the value that is in force for those who hold this one.
    pub fn now(&self) -> Arc<T> {
        let line = self.line.as_ref().filter(|line| line.from.load(SeqCst) > self.number);
        let later = line.and_then(|line| line.value.read().unwrap_or_else(PoisonError::into_inner).clone());
        later.unwrap_or_else(|| self.own.clone())
    }

    /// Takes its place behind the value that the listener has had before, if it had one.
    pub fn follow(&mut self, before: Option<&Later<T>>) {
        let line = || Line { from: AtomicU64::new(0), value: RwLock::default() };
        let of = before.and_then(|before| before.line.clone()).unwrap_or_else(|| Arc::new(line()));
        (self.number, self.line) = (before.map_or(1, |before| before.number + 1), Some(of));
    }

    pub fn is_of_listener(&self) -> bool {
        self.line.is_some()
    }

    /// From now on, it is in force for all who hold an earlier one.
    pub fn replace_earlier(&self) {
        if let Some(line) = &self.line {
            *line.value.write().unwrap_or_else(PoisonError::into_inner) = Some(self.own.clone());
            line.from.store(self.number, SeqCst);
        }
    }
}

impl<T> Clone for Later<T> {
    fn clone(&self) -> Self {
        Later { own: self.own.clone(), number: self.number, line: self.line.clone() }
    }
}

impl<T: Default> Default for Later<T> {
    fn default() -> Self {
        Later::new(T::default())
    }
}

impl<T: PartialEq> PartialEq for Later<T> {
    fn eq(&self, other: &Self) -> bool {
        self.own == other.own
    }
}

impl<T: Eq> Eq for Later<T> {}

impl<T: fmt::Debug> fmt::Debug for Later<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.own.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earlier_values_are_replaced_and_later_ones_hold_for_themselves() {
        let [mut one, mut two, mut three] = [1, 2, 3].map(Later::new);
        let now = |all: &[&Later<i32>]| all.iter().map(|later| *later.now()).collect::<Vec<_>>();
        one.follow(None);
        let held = one.clone();
        two.follow(Some(&one));
        assert_eq!(now(&[&held, &two]), [1, 2], "nobody has said so");
        three.follow(Some(&two));
        two.replace_earlier();
        assert_eq!(now(&[&held, &two, &three]), [2, 2, 3]);
        three.replace_earlier();
        assert_eq!(now(&[&held, &two, &three]), [3, 3, 3]);
        assert_eq!(*Later::new(4).now(), 4, "of no listener");
    }
}
