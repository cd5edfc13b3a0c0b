//! Signals to the launcher, and to ranks by it.

use std::{
    fs,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use super::{Scratch, ended, launcher, lines_of, signal, until};

#[test]
fn signals_are_forwarded() {
    for (name, handler, due) in
        [("INT", "trap 'echo saved; exit 0' INT;", 0), ("TERM", "", 143), ("HUP", "trap 'echo saved; exit 5' HUP;", 5)]
    {
        let scratch = Scratch::new(&format!("signal-{name}"));
        let script = format!("{handler} touch $DIR/$RANK; while :; do sleep 0.05; done");
        let mut command = launcher(&["-n", "2", "--max-restarts", "3", "sh", "-c", &script]);
        let running = command.env("DIR", scratch.path()).spawn().unwrap();
        until("a rank", || (0..2).all(|rank| scratch.path().join(rank.to_string()).exists()));
        signal(name, running.id());
        let (status, out, errors) = ended(running);
        assert_eq!(status, Some(due), "{name}: {out} {errors}");
        assert!(!errors.contains("started again"), "{errors}");
        assert!(due != 0 || lines_of(&out, 0) == ["saved"], "{out}");
    }
}

#[test]
fn a_second_signal_ends_ranks_that_do_not_listen() {
    let scratch = Scratch::new("twice");
    let script = "trap '' INT TERM; touch $DIR/$RANK; sleep 1000; sleep 1000";
    let running = launcher(&["-n", "2", "sh", "-c", script]).env("DIR", scratch.path()).spawn().unwrap();
    until("a rank", || (0..2).all(|rank| scratch.path().join(rank.to_string()).exists()));
    signal("INT", running.id());
    thread::sleep(Duration::from_millis(100));
    signal("INT", running.id());
    assert_eq!(ended(running).0, Some(137));
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_do_not_outlive_a_launcher_that_is_killed() {
    let scratch = Scratch::new("orphans");
    let script = "echo $$ > $DIR/$RANK.new; mv $DIR/$RANK.new $DIR/$RANK; trap '' TERM; read forever < $DIR/fifo";
    assert!(Command::new("mkfifo").arg(scratch.path().join("fifo")).status().unwrap().success());
    let mut running = launcher(&["-n", "2", "sh", "-c", script]).env("DIR", scratch.path()).spawn().unwrap();
    until("a rank", || (0..2).all(|rank| scratch.path().join(rank.to_string()).exists()));
    running.kill().unwrap();
    running.wait().unwrap();
    for rank in ["0", "1"] {
        let id = scratch.text(rank);
        // A zombie that nobody has reaped has no command line.
        let is_running = || fs::read(format!("/proc/{}/cmdline", id.trim())).is_ok_and(|line| !line.is_empty());
        until("the end of a rank", || !is_running());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_first_process_of_a_container_reaps_orphans_and_forwards_signals() {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["-rpf", "--mount-proc", "--kill-child"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    if !unshare().arg("true").status().is_ok_and(|status| status.success()) {
        println!("no namespaces here: not tried");
        return;
    }
    // An orphan ends, by a real-time signal too, and is no zombie then. The rank ends by a signal that the first process
    // gets, as those of its group do from a terminal. It gets the signal once: a second one would not let it save.
    for orphan in ["sleep 0.2", "sh -c 'sleep 0.2; kill -40 $$'"] {
        let script = format!(
            "setsid sh -c '{} & echo $! > $DIR/new; mv $DIR/new $DIR/orphan' < /dev/null > /dev/null 2>&1; \
             while [ -e /proc/$(cat $DIR/orphan) ]; do sleep 0.01; done; \
             trap 'sleep 1; echo saved; exit 5' INT; touch $DIR/ready; while :; do sleep 0.05; done",
            orphan.replace('\'', "'\\''")
        );
        let scratch = Scratch::new("init");
        let mut command = unshare();
        command.arg(env!("CARGO_BIN_EXE_weftgrad-run")).args(["-n", "1", "sh", "-c", &script]);
        let running = command.env("DIR", scratch.path()).process_group(0).spawn().unwrap();
        until("the end of an orphan", || scratch.path().join("ready").exists());
        let group = format!("-{}", running.id());
        assert!(Command::new("kill").args(["-s", "INT", "--", &group]).status().unwrap().success());
        let (status, out, errors) = ended(running);
        assert!(status == Some(5) && lines_of(&out, 0) == ["saved"], "{status:?} {out} {errors}");
    }
    // The launcher, which is the parent of the rank, ends or stops by signals for which it has no handler.
    let stops = "kill -s TSTP 1; for k in $(seq 500); do if grep -q 'State:.T' /proc/$PPID/status; \
                 then kill -s CONT 1; exit 6; fi; sleep 0.01; done";
    for (script, due) in [("kill -s QUIT 1; sleep 5", 131), (stops, 6)] {
        let mut command = unshare();
        command.args(["sh", "-c", "ulimit -c 0; exec \"$@\"", "sh"]);
        command.arg(env!("CARGO_BIN_EXE_weftgrad-run")).args(["-n", "1", "sh", "-c", script]);
        let (status, out, errors) = ended(command.process_group(0).spawn().unwrap());
        assert_eq!(status, Some(due), "{script}: {out} {errors}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn statuses_of_ranks_are_known_where_the_end_of_children_is_ignored() {
    let run = |line: &[&str]| {
        let mut command = Command::new(line[0]);
        ended(command.args(&line[1..]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    let container = ["unshare", "-rpf", "--mount-proc", "--kill-child"];
    let has_namespaces = run(&[&container[..], &["true"]].concat()).0 == Some(0);
    for (ranks, due) in [("1", 0), ("2", 4)] {
        let launcher = [env!("CARGO_BIN_EXE_weftgrad-run"), "-n", ranks, "sh", "-c", "exit $((4 * RANK))"];
        let ignoring = [&["env", "--ignore-signal=CHLD"], &launcher[..]].concat();
        // As the first process of a container too.
        for line in
            [ignoring.clone(), [&container[..], &ignoring].concat()].iter().take(1 + usize::from(has_namespaces))
        {
            let (status, _, errors) = run(line);
            assert_eq!(status, Some(due), "{line:?}: {errors}");
        }
    }
}
