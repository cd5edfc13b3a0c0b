//! The program `weftgrad-watch` in a terminal, which a signal ends.
#![cfg(all(unix, feature = "terminal"))]

use std::{fs::File, io::Read, os::unix::process::ExitStatusExt, process::Command};

use nix::{
    pty::{Winsize, openpty},
    sys::{
        signal::{self, Signal},
        termios::{LocalFlags, tcgetattr},
    },
    unistd::Pid,
};

#[test]
fn a_signal_leaves_the_terminal_as_it_was() {
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM] {
        let size = Winsize { ws_row: 32, ws_col: 100, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(&size, None).unwrap();
        let before = tcgetattr(&pty.slave).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_weftgrad-watch"));
        command.arg("no/such/run").stdin(pty.slave.try_clone().unwrap()).stdout(pty.slave.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        let mut written = String::new();
        let mut master = File::from(pty.master);
        let mut read_until = |end: &str| {
            while !written.contains(end) {
                let mut bytes = [0; 4096];
                let n = master.read(&mut bytes).unwrap();
                written += &String::from_utf8_lossy(&bytes[..n]);
            }
        };
        read_until("metrics.jsonl");
        assert!(!tcgetattr(&pty.slave).unwrap().local_flags.contains(LocalFlags::ICANON));
        signal::kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(signal as i32));
        assert_eq!(tcgetattr(&pty.slave).unwrap(), before, "{signal}");
        // Without a holder of the terminal, reading ends after the last byte.
        drop((pty.slave, command));
        read_until("\x1b[?1049l");
        read_until("\x1b[?25h");
    }
}
