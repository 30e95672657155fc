//! Error pages: files that are sent instead of our own line of text, or of an error of a server.

use std::{ops::RangeInclusive, sync::Arc};

/// The pages of a listener. The first one that has the status is sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ErrorPages(pub Vec<ErrorPage>);

/// One page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorPage {
    /// The statuses, from 400 to 599.
    pub status: Vec<RangeInclusive<u16>>,
    /// The media type.
    pub media_type: String,
    /// The contents of the file.
    pub body: Arc<[u8]>,
    /// Whether errors of servers are replaced as well.
    pub of_servers: bool,
}

impl ErrorPages {
    /// Returns the page for an error of our own.
    pub fn find(&self, status: u16) -> Option<&ErrorPage> {
        self.0.iter().find(|page| page.status.iter().any(|s| s.contains(&status)))
    }

    /// Returns the page that replaces an error of a server. A 401 is not replaced: it says how to log in.
    pub fn instead(&self, status: u16) -> Option<&ErrorPage> {
        self.find(status).filter(|page| page.of_servers && status != 401)
    }
}
