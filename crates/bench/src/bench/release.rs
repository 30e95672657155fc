//! Time to close the sockets of a spliced flow, and to recreate them: the
//! flow is spliced, released and recreated in turn, with no data in flight.

use super::{
    Result,
    driver::{Driver, Times, wait_phase},
    results::Figure,
};
use longsplice_datapath::{
    CommitOptions, Datapath, FreezeOptions, Half, Pair, Phase, Released, Repair, SwitchError, Tuple,
};
use std::{os::fd::OwnedFd, time::Instant};

/// A flow whose sockets are owned here. No data flows, so its positions stay the same.
pub struct Flow<'a> {
    datapath: &'a Datapath,
    legs: Pair<Tuple>,
    halves: Pair<Half>,
    /// `None` while the flow is released.
    sockets: Option<Pair<OwnedFd>>,
}

impl<'a> Flow<'a> {
    /// Starts with the engine's legs, which cannot be recreated: they are released, and the first recreation is not counted.
    pub async fn first(mut driver: Driver<'a>) -> Result<Flow<'a>> {
        let (datapath, legs, halves) = (driver.datapath, driver.tuples(), driver.halves());
        let mut uncounted = Times::default();
        splice(datapath, &legs, &halves, &mut uncounted).await?;
        driver.legs.iter_mut().for_each(longsplice_engine::Leg::close_silently);
        let released = forget(datapath, &legs)?;
        let sockets = recreate(datapath, &legs, &released, &mut uncounted).await?;
        Ok(Flow { datapath, legs, halves, sockets: Some(sockets) })
    }

    /// Splices, releases and recreates once.
    pub async fn cycle(&mut self, times: &mut Times) -> Result<()> {
        splice(self.datapath, &self.legs, &self.halves, times).await?;
        let began = Instant::now();
        for socket in self.sockets.take().into_iter().flatten() {
            Repair::On.set(&socket)?;
        }
        let released = forget(self.datapath, &self.legs)?;
        times.since(Figure::Release, began);
        self.sockets = Some(recreate(self.datapath, &self.legs, &released, times).await?);
        Ok(())
    }
}

async fn splice(datapath: &Datapath, legs: &Pair<Tuple>, halves: &Pair<Half>, times: &mut Times) -> Result<()> {
    loop {
        match times.of(Figure::Freeze, || datapath.freeze(halves.each_ref(), FreezeOptions::default())) {
            Err(SwitchError::Busy) => tokio::task::yield_now().await,
            other => {
                other?;
                break;
            }
        }
    }
    let began = Instant::now();
    let at = wait_phase(datapath, legs, Phase::Forwarding).await?;
    times.since(Figure::Drain, began);
    times
        .of(Figure::Commit, || datapath.commit(legs.each_ref(), &at, Pair::both(u32::MAX), CommitOptions::default()))?;
    Ok(())
}

fn forget(datapath: &Datapath, legs: &Pair<Tuple>) -> Result<Pair<Released>> {
    let both = datapath.release(&legs.client).zip(datapath.release(&legs.server));
    both.map(|(client, server)| Pair { client, server }).ok_or_else(|| "a leg's record is gone".into())
}

async fn recreate(
    datapath: &Datapath,
    legs: &Pair<Tuple>,
    released: &Pair<Released>,
    times: &mut Times,
) -> Result<Pair<OwnedFd>> {
    loop {
        match times.of(Figure::Recreate, || datapath.recreate(legs.each_ref(), released, false)) {
            Err(SwitchError::Busy) => tokio::task::yield_now().await,
            other => return Ok(other?.sockets),
        }
    }
}
