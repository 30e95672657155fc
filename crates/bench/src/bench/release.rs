//! Time to close the sockets of a spliced flow, and to recreate them: the
//! flow is spliced, released and recreated in turn, with no data in flight.

use super::{
    Result,
    driver::{Driver, Times, timed, wait_phase},
};
use longsplice_datapath::{Datapath, FreezeOptions, Half, Phase, Released, Repair, SwitchError, Tuple};
use std::{os::fd::OwnedFd, time::Instant};

/// A flow whose sockets are owned here. No data flows, so its positions stay the same.
pub struct Flow<'a> {
    datapath: &'a Datapath,
    legs: [Tuple; 2],
    halves: [Half; 2],
    /// `None` while the flow is released.
    sockets: Option<[OwnedFd; 2]>,
}

impl<'a> Flow<'a> {
    /// Starts with the engine's legs, which cannot be recreated: they are released, and the first recreation is not counted.
    pub async fn first(mut driver: Driver<'a>) -> Result<Flow<'a>> {
        let (datapath, legs, halves) = (driver.datapath, driver.tuples(), [driver.half(0), driver.half(1)]);
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
        times.release.push(began.elapsed().as_secs_f64() * 1e6);
        self.sockets = Some(recreate(self.datapath, &self.legs, &released, times).await?);
        Ok(())
    }
}

async fn splice(datapath: &Datapath, legs: &[Tuple; 2], [a, b]: &[Half; 2], times: &mut Times) -> Result<()> {
    loop {
        match timed(&mut times.freeze, || datapath.freeze(a, b, FreezeOptions::default())) {
            // Data not yet acknowledged by the hosts belongs to the last switch.
            Err(SwitchError::Busy) => {
                times.freeze.pop();
                tokio::task::yield_now().await;
            }
            other => {
                other?;
                break;
            }
        }
    }
    let began = Instant::now();
    let at = wait_phase(datapath, legs, Phase::Forwarding).await?;
    times.drain.push(began.elapsed().as_secs_f64() * 1e6);
    timed(&mut times.commit, || datapath.commit(legs.each_ref(), &at, [u32::MAX; 2], [false; 2]))?;
    Ok(())
}

fn forget(datapath: &Datapath, legs: &[Tuple; 2]) -> Result<[Released; 2]> {
    let both = datapath.release(&legs[0]).zip(datapath.release(&legs[1]));
    both.map(|(a, b)| [a, b]).ok_or_else(|| "a leg's record is gone".into())
}

async fn recreate(
    datapath: &Datapath,
    legs: &[Tuple; 2],
    released: &[Released; 2],
    times: &mut Times,
) -> Result<[OwnedFd; 2]> {
    loop {
        match timed(&mut times.recreate, || datapath.recreate([&legs[0], &legs[1]], released, false)) {
            Err(SwitchError::Busy) => {
                times.recreate.pop();
                tokio::task::yield_now().await;
            }
            other => return Ok(other?.sockets),
        }
    }
}
