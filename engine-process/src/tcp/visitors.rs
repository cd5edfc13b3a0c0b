//! Processes that connect to a listener, and strangers: all of them are heard at once.

use std::{
    io::{self, ErrorKind as Io},
    net::{TcpListener, TcpStream},
    sync::mpsc::{self, Receiver, Sender},
    thread,
    time::Instant,
};

use super::{
    secret::{ConnectionEnd, Secret},
    socket::{PATIENCE, PAUSE, TimedStream, read},
};

/// The most connections that are heard at once; further ones wait. Each takes a thread for at most [`PATIENCE`].
const MOST: usize = 128;

/// Connections to a listener that have not proved the secret so far.
pub(super) struct Visitors<'a> {
    listener: &'a TcpListener,
    secret: &'a Secret,
    job: &'a str,
    under_way: usize,
    sender: Sender<Visit>,
    visits: Receiver<Visit>,
    /// The last error of accepting a connection, until it is taken.
    refused: Option<io::Error>,
}

/// A connection that was heard.
pub(super) struct Visit {
    pub(super) stream: TcpStream,
    /// The name of its job and its first message, or the reason that it has proved nothing.
    pub(super) said: io::Result<(String, Vec<u8>)>,
}

impl<'a> Visitors<'a> {
    pub(super) fn of(listener: &'a TcpListener, secret: &'a Secret, job: &'a str) -> Self {
        let (sender, visits) = mpsc::channel();
        Visitors { listener, secret, job, under_way: 0, sender, visits, refused: None }
    }

    /// The next connection that was heard; none if there is none until a time.
    pub(super) fn next(&mut self, until: Instant) -> Option<Visit> {
        let listener = self.listener;
        // Asked before each: strangers that come again and again take no time beyond it.
        while Instant::now() < until {
            self.hear_those_that_came(|| listener.accept().map(|(stream, _)| stream));
            if let Ok(visit) = self.visits.recv_timeout(PAUSE) {
                self.under_way -= 1;
                return Some(visit);
            }
        }
        None
    }

    /// Takes the reason that a connection could not be accepted, if there was one since the last call.
    pub(super) fn take_refused(&mut self) -> Option<String> {
        self.refused.take().map(|error| format!("no connection can be accepted: {error}"))
    }

    /// Hears connections as they come. No error ends the meeting. Linux's `accept` returns errors of a connection's
    /// network, and a lack of descriptors, memory or threads passes once a connection is closed.
    fn hear_those_that_came(&mut self, accept: impl Fn() -> io::Result<TcpStream>) {
        while self.under_way < MOST {
            let heard = accept().and_then(|stream| stream.set_nonblocking(false).and_then(|()| self.hear(stream)));
            match heard {
                Ok(()) => {}
                Err(error) if error.kind() == Io::WouldBlock => return,
                Err(error) if error.kind() == Io::Interrupted => {}
                Err(error) => {
                    self.refused = Some(error);
                    return;
                }
            }
        }
    }

    fn hear(&mut self, mut stream: TcpStream) -> io::Result<()> {
        let (secret, job, sender) = (self.secret.clone(), self.job.to_string(), self.sender.clone());
        let hear = move || {
            let mut timed = TimedStream { stream: &mut stream, until: Instant::now() + PATIENCE };
            let said = secret.prove(&mut timed, ConnectionEnd::Listener, &job);
            let said = said.and_then(|job| Ok((job, read(&mut timed)?)));
            // Nobody listens any more once all have come.
            let _ = sender.send(Visit { stream, said });
        };
        thread::Builder::new().name("visitor".into()).spawn(hear)?;
        self.under_way += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::RefCell, time::Duration};

    use super::*;

    #[test]
    fn errors_of_single_connections_do_not_end_a_meeting() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let secret = Secret::default();
        let mut visitors = Visitors::of(&listener, &secret, "job");
        // ENETUNREACH, ECONNABORTED, EMFILE, ENOBUFS.
        for number in [101, 103, 24, 105] {
            let error = RefCell::new(Some(io::Error::from_raw_os_error(number)));
            visitors.hear_those_that_came(|| Err(error.take().unwrap_or_else(|| Io::WouldBlock.into())));
            assert_eq!(visitors.refused.as_ref().and_then(io::Error::raw_os_error), Some(number));
            assert!(visitors.take_refused().is_some_and(|why| why.starts_with("no connection can be accepted")));
        }
        assert_eq!(visitors.take_refused(), None);
        io::Write::write_all(&mut stranger, &[0; 256]).unwrap();
        let visit = visitors.next(Instant::now() + Duration::from_secs(60)).expect("the stranger was heard");
        assert!(visit.said.is_err());
    }
}
