//! What happens to a run of processes, drawn from a seed, and a link between two of them that can be cut.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::atomic::AtomicBool,
    thread,
};

use numcore::rng::Philox;

use crate::prelude::*;

/// Steps of a run.
pub const LENGTH: u64 = 24;
/// The time after which a process that says nothing is lost: long enough for a busy machine to run each once.
pub const SILENCE: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Kill,
    /// Stopped, and for how long; for good if that is not said.
    Stop(Option<Duration>),
    /// The connection to rank 0 is closed at both ends.
    Cut,
    /// The connection to rank 0 stays open, and nothing passes it any more.
    Mute,
}

/// A second process that is lost, while newcomers join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Second {
    /// A rank of the run.
    Rank(usize),
    /// The first newcomer.
    Newcomer,
}

/// One run and its fault.
#[derive(Clone, Copy, Debug)]
pub struct FaultPlan {
    pub ranks: usize,
    pub fault: Fault,
    pub victim: usize,
    /// The step in which it happens, and how long after its beginning.
    pub at: u64,
    pub later: Duration,
    /// Data parallelism, or a stage of ZeRO.
    pub how: u64,
    /// True if those that are left may go on from a commit.
    pub is_elastic: bool,
    /// True if the launcher starts newcomers in the place of lost ranks.
    pub joins: bool,
    pub second: Option<Second>,
    /// The steps between two checkpoints, and between two commits.
    pub save: u64,
    pub commit: u64,
}

impl FaultPlan {
    pub fn of(seed: u64) -> Self {
        let mut random = Philox::new(seed, 0);
        let mut below = |n: u64| random.below(n);
        let ranks = 2 + below(3) as usize;
        let pauses = [None, Some(SILENCE / 4), Some(SILENCE + Duration::from_millis(800))];
        // Each third of the seeds has its kind.
        let fault = match (seed % 3, below(3) as usize) {
            (0, _) => Fault::Kill,
            (1, pause) => Fault::Stop(pauses[pause]),
            (_, 0) => Fault::Mute,
            _ => Fault::Cut,
        };
        let first = u64::from(matches!(fault, Fault::Cut | Fault::Mute));
        FaultPlan {
            ranks,
            fault,
            victim: (first + below(ranks as u64 - first)) as usize,
            at: below(LENGTH - 2),
            later: Duration::from_micros(below(4000)),
            how: below(3),
            is_elastic: below(2) == 0,
            joins: false,
            second: None,
            save: 2 + below(6),
            commit: 1 + below(4),
        }
    }

    /// A run that newcomers join.
    pub fn with_newcomers(seed: u64) -> Self {
        let (plan, mut random) = (FaultPlan::of(seed), Philox::new(seed, 1));
        let mut below = |n: u64| random.below(n);
        let ranks = 3 + below(2) as usize;
        let victim = below(ranks as u64) as usize;
        let fault = match seed % 5 {
            2 => Fault::Stop(None),
            4 => Fault::Stop(Some(SILENCE + Duration::from_millis(800))),
            _ => Fault::Kill,
        };
        let second = match seed % 3 {
            0 => Some(Second::Rank((victim + 1 + below(ranks as u64 - 1) as usize) % ranks)),
            1 => Some(Second::Newcomer),
            _ => None,
        };
        // Two of three may be lost in turn, but are no majority at once.
        let ranks = if matches!(second, Some(Second::Rank(_))) { 4 } else { ranks };
        let (at, most) = (below(LENGTH / 2), 1 << below(18));
        let later = Duration::from_micros(below(most));
        FaultPlan { ranks, fault, victim, at, later, is_elastic: true, joins: true, second, ..plan }
    }

    /// True if nobody is lost: the pause is shorter than the others wait.
    pub fn is_harmless(&self) -> bool {
        matches!(self.fault, Fault::Stop(Some(pause)) if pause < SILENCE)
    }

    /// Lets the fault happen to this process, and returns when it has.
    pub fn happen(&self, link: Option<&Link>) {
        sleep(self.later);
        match (self.fault, link) {
            (Fault::Kill, _) => signal("KILL"),
            (Fault::Stop(pause), _) => {
                if let Some(pause) = pause {
                    let (own, pause) = (std::process::id(), pause.as_secs_f64());
                    let line = format!("(sleep {pause}; kill -CONT {own}) > /dev/null 2>&1 &");
                    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
                }
                signal("STOP");
            }
            (Fault::Cut, Some(link)) => link.cut(),
            (Fault::Mute, Some(link)) => link.0.is_mute.store(true, Ordering::SeqCst),
            _ => unreachable!("the victim has a link"),
        }
    }
}

pub fn signal(name: &str) {
    let own = std::process::id().to_string();
    assert!(Command::new("kill").args(["-s", name, &own]).status().unwrap().success());
}

/// Passes on what two processes say to each other, until it is cut.
#[derive(Clone, Default)]
pub struct Link(Arc<Wire>);

#[derive(Default)]
struct Wire {
    ends: Mutex<Vec<TcpStream>>,
    is_mute: AtomicBool,
}

impl Link {
    /// Leads from a port of its own, which is returned, to an address.
    pub fn to(address: SocketAddr) -> io::Result<(Self, u16)> {
        let (link, listener) = (Link::default(), TcpListener::bind("127.0.0.1:0")?);
        let (passing, port) = (link.clone(), listener.local_addr()?.port());
        thread::spawn(move || {
            for near in listener.incoming() {
                // While nobody listens there, whoever comes is turned away and comes again.
                let _ = near.and_then(|near| passing.join(near, TcpStream::connect(address)?));
            }
        });
        Ok((link, port))
    }

    fn join(&self, near: TcpStream, far: TcpStream) -> io::Result<()> {
        for (from, to) in [(&near, &far), (&far, &near)] {
            from.set_nodelay(true)?;
            let (mut from, mut to, link) = (from.try_clone()?, to.try_clone()?, self.clone());
            self.0.ends.lock().unwrap().push(from.try_clone()?);
            thread::spawn(move || {
                let mut bytes = vec![0; 1 << 16];
                while let Ok(count @ 1..) = from.read(&mut bytes) {
                    while link.0.is_mute.load(Ordering::SeqCst) {
                        thread::park();
                    }
                    if to.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Write);
            });
        }
        Ok(())
    }

    fn cut(&self) {
        self.0.ends.lock().unwrap().iter().for_each(|end| {
            // One that has ended already is cut.
            let _ = end.shutdown(Shutdown::Both);
        });
    }
}
