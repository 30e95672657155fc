//! Room in the tables of the data path, for listeners that need it.

use crate::{counters::Counters, log::complaints::Complaints};
use longsplice_engine::Splicer;
use tokio::sync::watch;

/// Whether the tables are nearly full: a transparent listener then takes no more connections, since without a record no segment
/// finds their sockets.
#[derive(Default)]
pub(crate) struct Tables {
    nearly_full: watch::Sender<bool>,
    complaints: Complaints,
}

impl Tables {
    /// Tells whether they are nearly full, from now on.
    pub fn nearly_full(&self) -> watch::Receiver<bool> {
        self.nearly_full.subscribe()
    }

    /// Looks again, if anybody wants to know. Called for each connection that is accepted.
    pub fn look(&self, splicer: &Splicer, counters: &Counters) {
        if self.nearly_full.receiver_count() == 0 {
            return;
        }
        let before = *self.nearly_full.borrow();
        let now = splicer.has_little_room(before);
        if now != before && self.nearly_full.send_replace(now) != now && now {
            Counters::add(&counters.left_alone);
            self.complaints.tell(
                "the tables of flows are nearly full: connections that transparent listeners would take are routed on; \
                 a larger --max-flows helps",
            );
        }
    }
}
