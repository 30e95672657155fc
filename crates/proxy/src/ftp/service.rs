//! FTP as one of the protocols of a program. Its listeners share nothing.

use super::serve;
use crate::{
    Config, Handler, ListenerConfig, Protocol, Service, StartError,
    context::{Front, Live},
    inherited::Inherited,
    pool::Pools,
};
use bytes::Bytes;
use longsplice_engine::Leg;
use std::{pin::Pin, sync::Arc};

struct Ftp;

/// Opens nothing: there is nothing to open.
pub fn open(_: &Config, _: &Pools, _: &Inherited) -> Result<Arc<dyn Service>, StartError> {
    Ok(Arc::new(Ftp))
}

impl Service for Ftp {
    fn serves(&self, protocol: &Protocol) -> bool {
        matches!(protocol, Protocol::Ftp(_))
    }

    fn reopen(&self, _: &Config, _: &Pools) -> Result<Arc<dyn Service>, StartError> {
        Ok(Arc::new(Ftp))
    }

    fn handler(&self, _: &ListenerConfig) -> Arc<dyn Handler> {
        Arc::new(Ftp)
    }
}

impl Handler for Ftp {
    fn serve<'a>(
        &'a self,
        live: Live,
        front: &'a Front,
        client: Leg,
        read: Bytes,
    ) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>> {
        let ftp = front.listener.ftp().expect("FTP is the only protocol that the service has");
        Box::pin(serve(live, front, ftp, (client, read.into())))
    }
}
