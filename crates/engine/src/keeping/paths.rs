//! Makes spliced flows follow the network: a thread watches for changes, and has the data path update next hops.

use crate::engine::{Engine, flow::KeeperMessage};
use longsplice_datapath::{Datapath, OpenError, Watch};
use std::{
    collections::HashSet,
    sync::{Arc, Weak},
    thread,
    time::Duration,
};

/// Maximum time until the thread notices the end of the engine.
const SLACK: Duration = Duration::from_secs(1);

/// Starts to follow the network. Flows of an earlier process follow as well.
pub(crate) fn follow(engine: &Arc<Engine>, d: &Datapath) -> Result<(), OpenError> {
    let watch = d.watch().map_err(|source| OpenError::Kernel { what: "watch the network", source })?;
    let weak = Arc::downgrade(engine);
    let work = move || keep_up(&weak, watch);
    let failed = |source| OpenError::Kernel { what: "thread", source };
    thread::Builder::new().name("paths".into()).spawn(work).map(drop).map_err(failed)
}

fn keep_up(weak: &Weak<Engine>, mut watch: Watch) {
    let mut failed = String::new();
    loop {
        watch.wait(SLACK);
        let Some(engine) = weak.upgrade() else { return };
        let (Some(d), false) = (engine.datapath(), engine.is_closing()) else { return };
        let error = match d.follow(&mut watch) {
            Ok(elsewhere) => {
                let flows: HashSet<u64> =
                    elsewhere.iter().filter_map(|leg| Some(engine.flow_of(&engine.present(leg)?)?.id)).collect();
                flows.into_iter().for_each(|id| engine.tell(KeeperMessage::Elsewhere(id)));
                String::new()
            }
            Err(error) => error.to_string(),
        };
        if !error.is_empty() {
            if error != failed {
                tracing::error!("spliced connections may not follow changes of the network: {error}");
            }
            drop(engine);
            thread::sleep(SLACK);
        }
        failed = error;
    }
}
