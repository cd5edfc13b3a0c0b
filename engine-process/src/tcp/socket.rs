//! Connections whose calls end by a time, and messages of the rendezvous on them.

#[cfg(target_os = "linux")]
use std::os::fd::AsFd;
use std::{
    io::{self, ErrorKind as Io, Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    time::{Duration, Instant},
};

/// The pause between attempts to connect, and between looks for a connection.
pub(super) const PAUSE: Duration = Duration::from_millis(5);
/// The time that one that has connected has for its first words.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// The most bytes of one message of the rendezvous: an address of each process.
const LONGEST: usize = 1 << 20;

/// A stream whose reads and writes end by a time.
pub(super) struct TimedStream<'a> {
    pub(super) stream: &'a mut TcpStream,
    pub(super) until: Instant,
}

impl TimedStream<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Io::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(bytes)
    }
}

impl Write for TimedStream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

pub(super) fn connect(addresses: &[SocketAddr], until: Instant) -> io::Result<TcpStream> {
    let mut last = io::Error::from(Io::TimedOut);
    for address in addresses {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        match TcpStream::connect_timeout(address, left.min(PATIENCE)) {
            // A port at which nobody listens may be given to the connection itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => last = Io::ConnectionRefused.into(),
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Tells whether an address is one of this machine. That a socket can be bound to it does not say so: a setting of
/// Linux, `ip_nonlocal_bind`, allows any address.
#[cfg(target_os = "linux")]
pub(super) fn is_own(ip: IpAddr) -> bool {
    use nix::{ifaddrs::getifaddrs, sys::socket::SockaddrStorage};

    let of = |at: SockaddrStorage| match (at.as_sockaddr_in(), at.as_sockaddr_in6()) {
        (Some(v4), _) => Some(IpAddr::from(v4.ip())),
        (None, v6) => v6.map(|v6| v6.ip().into()),
    };
    let is_its = |mut all: nix::ifaddrs::InterfaceAddressIterator| {
        all.any(|interface| interface.address.and_then(of) == Some(ip))
    };
    ip.is_loopback() || getifaddrs().is_ok_and(is_its)
}

/// Tells whether an address is one of this machine.
#[cfg(not(target_os = "linux"))]
pub(super) fn is_own(ip: IpAddr) -> bool {
    std::net::TcpListener::bind((ip, 0)).is_ok()
}

/// Tells whether the process at the other end has closed a connection on which it has nothing to say.
pub(super) fn is_closed(stream: &TcpStream) -> bool {
    !is_silent(stream)
}

/// Tells whether a connection is open, and nothing of it waits to be read.
pub(super) fn is_silent(stream: &TcpStream) -> bool {
    peeked(stream).is_err_and(|error| error.kind() == Io::WouldBlock)
}

/// Tells whether the process at the other end has closed a connection, behind bytes that wait to be read too.
#[cfg(target_os = "linux")]
pub(super) fn has_ended(stream: &TcpStream) -> bool {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    let mut look = [PollFd::new(stream.as_fd(), PollFlags::from_bits_retain(libc::POLLRDHUP))];
    poll(&mut look, PollTimeout::ZERO).is_ok_and(|count| count > 0)
}

/// Tells whether the process at the other end has closed a connection, and all that it has sent was read.
#[cfg(not(target_os = "linux"))]
pub(super) fn has_ended(stream: &TcpStream) -> bool {
    !peeked(stream).map_or_else(|error| error.kind() == Io::WouldBlock, |count| count > 0)
}

/// The number of bytes that have come, 1 at most; 0 after the last.
fn peeked(stream: &TcpStream) -> io::Result<usize> {
    let looked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    stream.set_nonblocking(false).and(looked)
}

pub(super) fn write(stream: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_le_bytes(), bytes].concat())
}

/// Reads one message, of a bounded length.
pub(super) fn read(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::new(Io::InvalidData, format!("a message of the rendezvous has {length} bytes")));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, UdpSocket},
        thread,
    };

    use super::*;

    #[test]
    fn addresses_of_this_machine_are_known() {
        for (ip, is_its) in [("127.0.0.2", true), ("::1", true), ("192.0.2.7", false), ("2001:db8::7", false)] {
            assert_eq!(is_own(ip.parse().unwrap()), is_its, "{ip}");
        }
        // The address that packets to elsewhere have, if there is a network.
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        if socket.connect("192.0.2.7:9").is_ok() {
            assert!(is_own(socket.local_addr().unwrap().ip()));
        }
    }

    #[test]
    fn the_end_of_a_connection_is_seen_behind_its_bytes() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let own = listener.accept().unwrap().0;
        assert!(is_silent(&own) && !has_ended(&own));
        other.write_all(b"words").unwrap();
        while is_silent(&own) {
            thread::yield_now();
        }
        assert!(!has_ended(&own));
        drop(other);
        if cfg!(not(target_os = "linux")) {
            (&own).read_exact(&mut [0; 5]).unwrap();
        }
        let begun = Instant::now();
        while !has_ended(&own) {
            assert!(begun.elapsed() < Duration::from_secs(60), "its end is not seen");
        }
    }
}
