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
        Visitors { listener, secret, job, under_way: 0, sender, visits }
    }

    /// The next connection that was heard; none if there is none until a time.
    pub(super) fn next(&mut self, until: Instant) -> io::Result<Option<Visit>> {
        // Asked before each: strangers that come again and again take no time beyond it.
        while Instant::now() < until {
            self.hear_those_that_came()?;
            if let Ok(visit) = self.visits.recv_timeout(PAUSE) {
                self.under_way -= 1;
                return Ok(Some(visit));
            }
        }
        Ok(None)
    }

    fn hear_those_that_came(&mut self) -> io::Result<()> {
        while self.under_way < MOST {
            match self.listener.accept().and_then(|(stream, _)| stream.set_nonblocking(false).map(|()| stream)) {
                Ok(stream) => self.hear(stream)?,
                Err(error) if error.kind() == Io::WouldBlock => return Ok(()),
                // A connection that was closed before it was accepted, or an interruption.
                Err(error) if matches!(error.kind(), Io::ConnectionAborted | Io::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
