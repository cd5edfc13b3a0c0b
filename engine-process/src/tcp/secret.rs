//! The proof, at the beginning of every connection, that both ends know the secret of their job.
//!
//! The end that has connected proves first, so that a stranger gets nothing to try secrets on. Both prove for the
//! random numbers and the jobs of both, under different labels. So no answer of another connection, of another job with
//! the same secret, or of the other end fits.

use std::{
    fmt,
    io::{self, Read, Write},
};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The first bytes of a connection: the protocol and its version.
const MAGIC: &[u8; 16] = b"weftgrad tcp 002";
const NONCE: usize = 32;
const PROOF: usize = 32;
/// The most bytes of the name of a job.
pub(super) const LONGEST_JOB: usize = 1 << 10;
/// The fewest bytes of a secret: those who overhear a proof can try short ones.
const SHORTEST: usize = 16;
/// The byte before the second proof, if the first was right.
const PROVEN: u8 = 1;

/// The secret of a job; empty on a loopback address without one.
#[derive(Clone, Default)]
pub(super) struct Secret(Vec<u8>);

/// The first words of an end: its random number, and the name of its job.
struct Greeting {
    nonce: [u8; NONCE],
    job: Vec<u8>,
}

/// The end of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionEnd {
    Dialer,
    Listener,
}

impl Secret {
    pub(super) fn new(bytes: &[u8]) -> Result<Self, String> {
        if bytes.len() < SHORTEST {
            return Err(format!("a secret of {} bytes is too short: `openssl rand -hex 32` prints one", bytes.len()));
        }
        Ok(Secret(bytes.to_vec()))
    }

    /// The proof of an end, given the greetings of the dialer and of the listener.
    fn proof(&self, of: ConnectionEnd, greetings: [&Greeting; 2]) -> io::Result<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(io::Error::other)?;
        mac.update(if of == ConnectionEnd::Dialer { b"dialer" } else { b"listener" });
        greetings.iter().for_each(|greeting| mac.update(&greeting.to_bytes()));
        Ok(mac)
    }

    /// Proves the secret to the other end and checks its proof, before anything else is read. Returns the name of the
    /// other end's job.
    pub(super) fn prove(&self, stream: &mut (impl Read + Write), own: ConnectionEnd, job: &str) -> io::Result<String> {
        let mut nonce = [0; NONCE];
        getrandom::fill(&mut nonce).map_err(io::Error::other)?;
        self.prove_with(stream, own, job, nonce)
    }

    pub(super) fn prove_with(
        &self,
        stream: &mut (impl Read + Write),
        own: ConnectionEnd,
        job: &str,
        nonce: [u8; NONCE],
    ) -> io::Result<String> {
        let greeting = Greeting { nonce, job: job.into() };
        let theirs = if own == ConnectionEnd::Dialer {
            stream.write_all(&greeting.to_bytes())?;
            let theirs = Greeting::read(stream)?;
            let proof = |of| self.proof(of, [&greeting, &theirs]);
            stream.write_all(&proof(ConnectionEnd::Dialer)?.finalize().into_bytes())?;
            let [answer] = read(stream)?;
            if answer != PROVEN {
                return Err(denied("the secret of this process is not that of the one that listens"));
            }
            check(proof(ConnectionEnd::Listener)?, &read(stream)?)?;
            theirs
        } else {
            let theirs = Greeting::read(stream)?;
            stream.write_all(&greeting.to_bytes())?;
            let proof = |of| self.proof(of, [&theirs, &greeting]);
            if let Err(error) = check(proof(ConnectionEnd::Dialer)?, &read(stream)?) {
                // The error to report is the wrong proof.
                let _ = stream.write_all(&[0]);
                return Err(error);
            }
            stream.write_all(&[&[PROVEN], &proof(ConnectionEnd::Listener)?.finalize().into_bytes()[..]].concat())?;
            theirs
        };
        String::from_utf8(theirs.job)
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "the job's name is no text"))
    }
}

impl Greeting {
    fn to_bytes(&self) -> Vec<u8> {
        [&MAGIC[..], &self.nonce, &(self.job.len() as u16).to_le_bytes(), &self.job].concat()
    }

    fn read(stream: &mut impl Read) -> io::Result<Greeting> {
        let invalid = |why| io::Error::new(io::ErrorKind::InvalidData, why);
        if &read::<{ MAGIC.len() }>(stream)? != MAGIC {
            return Err(invalid("the other end is not a process of weftgrad's version"));
        }
        let (nonce, length) = (read(stream)?, u16::from_le_bytes(read(stream)?).into());
        if length > LONGEST_JOB {
            return Err(invalid("the job's name is too long"));
        }
        let mut job = vec![0; length];
        stream.read_exact(&mut job)?;
        Ok(Greeting { nonce, job })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

fn read<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Compares in constant time.
fn check(expected: Hmac<Sha256>, proof: &[u8; PROOF]) -> io::Result<()> {
    expected.verify_slice(proof).map_err(|_| denied("the other end does not know the secret of this job"))
}

fn denied(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}
