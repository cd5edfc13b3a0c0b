//! Jobs of real processes under `weftgrad-run`, most of them shells.
#![allow(missing_docs)]
#![cfg(unix)]

#[path = "jobs/signals.rs"]
mod signals;

use std::{
    env, fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{self, Child, Command, Output, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use engine_process::{
    Tcp,
    comm::{Collectives, Communicator, Quorum, Rendezvous},
};
use numcore::NullRuntime;

/// Longer than any job here may take, on a busy machine too.
const LONG: Duration = Duration::from_secs(60);
/// The variable that tells this program to be a rank, and what it does in its first start.
const ROLE: &str = "WEFTGRAD_TEST_ROLE";

fn launcher(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weftgrad-run"));
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Variables of a launcher above the tests.
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "WEFTGRAD_SECRET", "WEFTGRAD_SECRET_FILE"].iter().for_each(|name| {
        command.env_remove(name);
    });
    command
}

fn ended(launcher: Child) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = launcher.wait_with_output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Status, output and errors of ranks that are shells.
fn shells(options: &str, script: &str) -> (Option<i32>, String, String) {
    let options: Vec<&str> = options.split_whitespace().chain(["--", "sh", "-c", script]).collect();
    ended(launcher(&options).spawn().unwrap())
}

fn lines_of(text: &str, rank: usize) -> Vec<&str> {
    let prefix = format!("[{rank}] ");
    text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect()
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LONG, "{what} never came");
        thread::sleep(Duration::from_millis(5));
    }
}

fn signal(name: &str, id: u32) {
    assert!(Command::new("kill").args(["-s", name, &id.to_string()]).status().unwrap().success());
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("weftgrad-launch-{name}-{}", process::id()));
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.0.join(name)).unwrap_or_default()
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn lines_come_whole_and_in_order_behind_their_rank() {
    let script = "for k in $(seq 300); do echo out $k; echo error $k >&2; done";
    let (status, out, errors) = shells("-n 3", script);
    assert_eq!(status, Some(0), "{errors}");
    for rank in 0..3 {
        assert_eq!(lines_of(&out, rank), (1..=300).map(|k| format!("out {k}")).collect::<Vec<_>>());
        assert_eq!(lines_of(&errors, rank), (1..=300).map(|k| format!("error {k}")).collect::<Vec<_>>());
    }
    assert_eq!((out.lines().count(), errors.lines().count()), (900, 900));
}

#[test]
fn much_without_a_line_is_passed_on_in_pieces() {
    let (status, out, _) = shells("-n 2", "head -c 300000 /dev/zero | tr '\\0' x; printf '\\nend'");
    assert_eq!(status, Some(0));
    for rank in 0..2 {
        let lines = lines_of(&out, rank);
        assert_eq!(lines.last(), Some(&"end"));
        assert_eq!(lines[..lines.len() - 1].concat(), "x".repeat(300_000));
        assert!(lines.iter().all(|line| line.len() <= 64 << 10));
    }
}

#[test]
fn ranks_have_their_environment_and_arguments() {
    let script = "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $OMPI_COMM_WORLD_RANK. \"$@\"";
    let args = ["-n", "2", "sh", "-c", script, "sh", "--steps", "a b", "-n"];
    let (status, out, errors) = ended(launcher(&args).env("OMPI_COMM_WORLD_RANK", "7").spawn().unwrap());
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(lines_of(&out, 0), ["0 2 0 2 127.0.0.1 . --steps a b -n"]);
    assert_eq!(lines_of(&out, 1), ["1 2 1 2 127.0.0.1 . --steps a b -n"]);
}

#[test]
fn a_rank_that_fails_ends_the_others_and_has_the_last_word() {
    // Those that do not listen to SIGTERM are killed, with the programs that they have started.
    let script =
        "if [ $RANK = 1 ]; then echo fine; echo the disk is full >&2; exit 7; fi; trap '' TERM; sleep 1000; sleep 1000";
    let (status, _, errors) = shells("-n 3", script);
    assert_eq!(status, Some(7), "{errors}");
    let last = "weftgrad-run: rank 1 exited with status 7; its last words:\n  the disk is full\n";
    assert!(errors.ends_with(last), "{errors}");
    // Without words on the error stream, the last ones of the other count.
    let (status, _, errors) = shells("-n 1", "echo no config; exit 1");
    assert!(status == Some(1) && errors.ends_with("its last words:\n  no config\n"), "{errors}");
}

#[test]
fn last_words_are_read_to_their_end_while_other_ranks_go_on() {
    let scratch = Scratch::new("words");
    // The stream stays open in a program of another session, which the end of the rank does not kill.
    let script = "if [ $RANK = 0 ]; then exit 0; fi; \
                  setsid sh -c 'touch $DIR/begun; sleep 0.2; echo the disk is full >&2' & \
                  until [ -e $DIR/begun ]; do sleep 0.01; done; exit 7";
    let mut command = launcher(&["-n", "2", "--min-ranks", "1", "sh", "-c", script]);
    let (status, _, errors) = ended(command.env("DIR", scratch.path()).spawn().unwrap());
    assert_eq!(status, Some(0), "{errors}");
    let last = "weftgrad-run: rank 1 exited with status 7; its last words:\n  the disk is full\n";
    assert!(errors.contains(last), "{errors}");
}

#[test]
fn a_rank_that_stays_stopped_is_not_waited_for() {
    for (code, due) in [(0, 0), (4, 137)] {
        let script = format!("if [ $RANK = 1 ]; then kill -STOP $$; fi; exit {code}");
        let (status, _, errors) = shells("-n 2 --min-ranks 1", &script);
        assert_eq!(status, Some(due), "{errors}");
        assert!(errors.contains("rank 1 was killed by signal 9 (SIGKILL)"), "{errors}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_was_stopped_and_goes_on_is_waited_for() {
    let scratch = Scratch::new("goes-on");
    let script = "if [ $RANK = 1 ]; then echo $$ > $DIR/new; mv $DIR/new $DIR/id; kill -STOP $$; sleep 7; echo done; \
                  else until grep -q 'State:.T' /proc/$(cat $DIR/id)/status; do sleep 0.01; done; \
                  kill -CONT $(cat $DIR/id); fi 2> $DIR/errors";
    let mut command = launcher(&["-n", "2", "--min-ranks", "1", "sh", "-c", script]);
    let (status, out, errors) = ended(command.env("DIR", scratch.path()).spawn().unwrap());
    assert!(status == Some(0) && lines_of(&out, 1) == ["done"], "{status:?} {out} {errors}");
}

#[test]
fn ranks_that_listen_to_sigterm_may_save() {
    let script =
        "if [ $RANK = 0 ]; then sleep 0.3; exit 3; fi; trap 'echo saved; exit 0' TERM; while :; do sleep 0.05; done";
    let (status, out, errors) = shells("-n 2", script);
    assert!(status == Some(3) && lines_of(&out, 1) == ["saved"], "{out} {errors}");
}

#[test]
fn a_rank_that_is_killed_is_named_with_the_signal() {
    let (status, _, errors) = shells("-n 2", "if [ $RANK = 0 ]; then kill -9 $$; fi; exec sleep 1000");
    assert!(status == Some(137) && errors.contains("rank 0 was killed by signal 9 (SIGKILL)"), "{status:?} {errors}");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    let (status, _, errors) = ended(launcher(&["-n", "2", "no-such-program"]).spawn().unwrap());
    assert!(status == Some(127) && errors.contains("`no-such-program` cannot be started"), "{status:?} {errors}");
    let (status, _, errors) = ended(launcher(&["-n", "0", "true"]).spawn().unwrap());
    assert!(status == Some(2) && errors.contains("give at least 1"), "{status:?} {errors}");
}

#[test]
fn all_ranks_are_started_again_apart_from_what_was_before() {
    let scratch = Scratch::new("restarts");
    let script = "echo $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS $WEFTGRAD_SECRET $TORCHELASTIC_RUN_ID; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 2 ]; then exit 0; fi; if [ $RANK = 1 ]; then exit 9; fi; exec sleep 1000";
    let logs = scratch.path().join("logs");
    let options = format!("-n 2 --max-restarts 2 --log-dir {}", logs.display());
    let (status, out, errors) = shells(&options, script);
    assert_eq!(status, Some(0), "{errors}");
    assert!(errors.contains("started again, 2 of 2 times"), "{errors}");
    // The other one may be ended before its first line.
    let lines = lines_of(&out, 1);
    assert!(lines_of(&out, 0).iter().all(|line| lines.contains(line)), "{out}");
    let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split(' ').collect()).collect();
    let counts: Vec<&str> = words.iter().map(|words| words[0]).collect();
    assert_eq!(counts, ["0", "1", "2"]);
    for k in [2, 3] {
        assert!(words[0][k] != words[1][k] && words[1][k] != words[2][k], "{out}");
    }
    assert_eq!(scratch.text("logs/rank-1.log").lines().collect::<Vec<_>>(), lines);
    // After the last restart the job has failed.
    let (status, ..) = shells("-n 2 --max-restarts 1", "exit 4");
    assert_eq!(status, Some(4));
}

/// Not a test of its own: the program of a rank, which other tests start.
#[test]
fn rank() {
    let Ok(role) = env::var(ROLE) else { return };
    let of = |name: &str| env::var(name).unwrap();
    let is_first = of("TORCHELASTIC_RESTART_COUNT") == "0";
    let number = |name: &str| of(name).parse::<usize>().unwrap();
    let is_last = number("RANK") + 1 == number("WORLD_SIZE");
    if role == "fails early" && is_first && is_last {
        process::exit(6);
    }
    let processes = Tcp::from_env().unwrap().join().unwrap();
    if role == "elastic" {
        let mut worlds = Arc::new(processes).rendezvous(NullRuntime::new(), Quorum::default()).unwrap();
        let world = worlds.next_world().unwrap().comm;
        // The barrier has all ranks; its end may be lost with one of them.
        let begun = world.barrier();
        if is_last {
            signal("KILL", process::id());
        }
        begun.and_then(|()| world.barrier()).unwrap_err();
        println!("\nleft {:?}", worlds.next_world().unwrap().comm.members());
        drop(worlds);
        process::exit(0);
    }
    if role == "joins" || role == "grows" {
        let mut worlds = Arc::new(processes).rendezvous(NullRuntime::new(), Quorum::default()).unwrap();
        loop {
            let world = worlds.next_world().unwrap();
            // The end of a barrier may be lost with one that is killed.
            let _ = world.comm.barrier();
            if world.newcomers > 0 {
                println!("\njoined {} of {}", world.comm.rank(), world.comm.size());
                drop(worlds);
                process::exit(0);
            }
            match &*role {
                "joins" if is_first && is_last => signal("KILL", process::id()),
                "grows" if is_last => signal("USR1", number("WEFTGRAD_LAUNCHER") as u32),
                _ => {}
            }
            while let Ok(all) = world.comm.exchange_equal([u8::from(worlds.newcomers() > 0)])
                && all.iter().all(|[waits]| *waits == 0)
            {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
    let gathered = processes.run(
        |_| Ok(NullRuntime::new()),
        |comm| {
            comm.barrier()?;
            if role == "fails late" && is_first && is_last {
                process::exit(6);
            }
            comm.exchange(&[comm.rank() as u8])
        },
    );
    println!("\ngathered {:?}", gathered.unwrap().concat());
    drop(processes);
    process::exit(0);
}

fn job(options: &[&str], role: &str, secret: Option<&Path>) -> Child {
    let program = env::current_exe().unwrap();
    let mut command = launcher(options);
    command.arg(program).args(["--exact", "rank", "--nocapture"]).env(ROLE, role);
    command.envs(secret.map(|file| ("WEFTGRAD_SECRET_FILE", file))).spawn().unwrap()
}

fn gathered_on(running: Child, ranks: impl Iterator<Item = usize>, size: usize) {
    let (status, out, errors) = ended(running);
    assert_eq!(status, Some(0), "{errors}");
    let all = format!("gathered {:?}", (0..size as u8).collect::<Vec<_>>());
    for rank in ranks {
        assert!(lines_of(&out, rank).contains(&&*all), "{out} {errors}");
    }
}

#[test]
fn two_jobs_at_once_do_not_meet() {
    let jobs = [2, 3].map(|size| (size, job(&["-n", &size.to_string()], "", None)));
    for (size, running) in jobs {
        gathered_on(running, 0..size, size);
    }
}

#[test]
fn those_that_can_go_on_without_a_rank_do() {
    let (status, out, errors) = ended(job(&["-n", "3", "--min-ranks", "2"], "elastic", None));
    assert_eq!(status, Some(0), "{errors}");
    assert!(errors.contains("rank 2 was killed by signal 9"), "{errors}");
    for rank in 0..2 {
        assert!(lines_of(&out, rank).contains(&"left [0, 1]"), "{out} {errors}");
    }
    // One more than may be lost.
    let (status, ..) = shells("-n 3 --min-ranks 2", "if [ $RANK = 0 ]; then exec sleep 1000; fi; exit 4");
    assert_eq!(status, Some(4));
}

#[test]
fn a_rank_that_was_lost_joins_those_that_are_left_and_another_when_asked() {
    let joins = job(&["-n", "3", "--elastic", "2:3", "--max-restarts", "1"], "joins", None);
    let grows = job(&["-n", "2", "--elastic", "1:3"], "grows", None);
    for (running, due) in [(joins, "rank 2 was killed by signal 9"), (grows, "rank 2 is started to join")] {
        let (status, out, errors) = ended(running);
        assert!(status == Some(0) && errors.contains(due), "{status:?} {errors}");
        for rank in 0..3 {
            assert!(lines_of(&out, rank).contains(&&*format!("joined {rank} of 3")), "{out} {errors}");
        }
    }
}

#[test]
fn a_rank_of_another_node_joins_those_that_are_left() {
    let scratch = Scratch::new("join-nodes");
    let secret = scratch.path().join("secret");
    fs::write(&secret, "0123456789abcdef0123456789abcdef\n").unwrap();
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let node = |node: &str| {
        let place = ["--nodes", "2", "--node-rank", node, "--endpoint", &free];
        let elastic = ["-n", "2", "--elastic", "1:2", "--max-restarts", "1"];
        job(&[&elastic[..], &place[..]].concat(), "joins", Some(&secret))
    };
    for (first, running) in [0, 2].into_iter().zip(["0", "1"].map(node)) {
        let (status, out, errors) = ended(running);
        assert!(
            status == Some(0) && errors.contains("rank 3 is started to join") == (first == 2),
            "{status:?} {errors}"
        );
        for rank in first..first + 2 {
            assert!(lines_of(&out, rank).contains(&&*format!("joined {rank} of 4")), "{out} {errors}");
        }
    }
}

#[test]
fn ranks_are_started_to_join_so_often_and_the_job_ends_below_its_fewest() {
    let scratch = Scratch::new("newcomers");
    let script = "touch $WEFTGRAD_MEMBER_FILE; \
                  if [ $RANK = 0 ]; then until [ -e $DIR/done ]; do sleep 0.01; done; exit 0; fi; \
                  echo $TORCHELASTIC_RESTART_COUNT ${WEFTGRAD_NEWCOMER:-0} $WEFTGRAD_JOIN_ADDRESS; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 2 ]; then touch $DIR/done; fi; exit 4";
    let mut command = launcher(&["-n", "2", "--elastic", "1:2", "--max-restarts", "2", "sh", "-c", script]);
    command.env("DIR", scratch.path()).env("WEFTGRAD_NEWCOMER", "1");
    let (status, out, errors) = ended(command.spawn().unwrap());
    assert_eq!(status, Some(0), "{errors}");
    let lines: Vec<Vec<&str>> = lines_of(&out, 1).iter().map(|line| line.split(' ').collect()).collect();
    let starts: Vec<&[&str]> = lines.iter().map(|words| &words[..2]).collect();
    assert_eq!(starts, [["0", "0"], ["1", "1"], ["2", "1"]]);
    assert!(lines.iter().all(|words| words[2] == lines[0][2] && words[2].starts_with("127.0.0.1:")), "{out}");

    let script = "touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 0 ]; then exec sleep 1000; fi; exit 4";
    let (status, _, errors) = shells("-n 2 --elastic 2:2 --max-restarts 3", script);
    let due = "1 ranks are left, and at least 2 must run: the job ends";
    assert!(status == Some(4) && errors.contains(due) && !errors.contains("started"), "{status:?} {errors}");
    let (status, _, errors) = shells("-n 2 --elastic 2", "true");
    assert!(status == Some(2) && errors.contains("such as 2:4"), "{errors}");
}

#[test]
fn a_newcomer_that_cannot_be_started_does_not_end_the_others() {
    let scratch = Scratch::new("unstarted");
    let copy = scratch.path().join("launcher");
    // Written by another program: one that this has open for writing in a fork cannot be executed.
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_weftgrad-run")).arg(&copy).status().unwrap().success());
    // Ranks start through the launcher's program, which is gone once rank 1 has ended.
    let script = "touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 1 ]; then rm $COPY; exit 4; fi; \
                  while [ -e $COPY ]; do sleep 0.01; done; sleep 1; echo whole";
    let mut command = Command::new(&copy);
    command.args(["-n", "2", "--elastic", "1:2", "--max-restarts", "3", "sh", "-c", script]).env("COPY", &copy);
    let running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (status, out, errors) = ended(running);
    assert!(status == Some(0) && lines_of(&out, 0) == ["whole"], "{status:?} {out} {errors}");
    assert!(errors.contains("the others go on without rank 1: `"), "{errors}");
}

#[test]
fn newcomers_that_are_left_at_the_end_of_a_run_do_not_keep_it() {
    let scratch = Scratch::new("left");
    // All members end well, or all fail, while a newcomer waits to be taken in.
    for (code, due, says) in [(0, 0, "rank 1 is started to join"), (5, 5, "no rank is left that was in the run")] {
        let script = format!(
            "if [ ${{WEFTGRAD_NEWCOMER:-0}} = 1 ]; then touch $DIR/waits-{code}; sleep 1000; fi; \
             touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 1 ]; then exit 4; fi; \
             until [ -e $DIR/waits-{code} ]; do sleep 0.01; done; exit {code}"
        );
        let mut command = launcher(&["-n", "2", "--elastic", "1:2", "--max-restarts", "1", "sh", "-c", &script]);
        let (status, _, errors) = ended(command.env("DIR", scratch.path()).spawn().unwrap());
        assert!(status == Some(due) && errors.contains(says), "{status:?} {errors}");
    }
}

#[test]
fn a_node_that_has_lost_its_members_goes_on_if_others_take_its_newcomers_in() {
    let scratch = Scratch::new("lost-node");
    // The second newcomer is started once no member is left here. Then members of other nodes take both in.
    let script = "if [ $TORCHELASTIC_RESTART_COUNT = 2 ]; then touch $DIR/taken; fi; \
                  if [ ${WEFTGRAD_NEWCOMER:-0} = 1 ]; then touch $DIR/waits; \
                  until [ -e $DIR/taken ]; do sleep 0.01; done; touch $WEFTGRAD_MEMBER_FILE; exit 0; fi; \
                  touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 2 ]; then exit 4; fi; \
                  until [ -e $DIR/waits ]; do sleep 0.01; done; exit 4";
    let place = ["--nodes", "2", "--node-rank", "1", "--endpoint", "127.0.0.1:9"];
    let elastic = ["-n", "2", "--elastic", "1:2", "--max-restarts", "2", "sh", "-c", script];
    let mut command = launcher(&[&place[..], &elastic[..]].concat());
    let (status, _, errors) =
        ended(command.env("DIR", scratch.path()).env("WEFTGRAD_SECRET", "0".repeat(64)).spawn().unwrap());
    assert!(status == Some(0) && errors.matches("is started to join").count() == 2, "{status:?} {errors}");
}

#[test]
fn a_node_at_which_others_join_ends_once_it_has_lost_its_members() {
    let scratch = Scratch::new("lost-endpoint");
    let script = "if [ ${WEFTGRAD_NEWCOMER:-0} = 1 ]; then touch $DIR/waits; sleep 20; exit 0; fi; \
                  touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 1 ]; then exit 4; fi; \
                  until [ -e $DIR/waits ]; do sleep 0.01; done; exit 5";
    let place = ["--nodes", "2", "--node-rank", "0", "--endpoint", "127.0.0.1:9"];
    let elastic = ["-n", "2", "--elastic", "1:2", "--max-restarts", "2", "sh", "-c", script];
    let mut command = launcher(&[&place[..], &elastic[..]].concat());
    let (status, _, errors) =
        ended(command.env("DIR", scratch.path()).env("WEFTGRAD_SECRET", "0".repeat(64)).spawn().unwrap());
    let why = "no rank is left on the node at which others join that was in the run: the job ends";
    assert!(status == Some(5) && errors.contains(why), "{status:?} {errors}");
}

#[test]
fn ranks_that_have_not_met_are_started_again_all() {
    let script = "if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then echo ${WEFTGRAD_NEWCOMER:-0}; exit 0; fi; \
                  if [ $RANK = 1 ]; then exit 6; fi; exec sleep 1000";
    // Too few are left at a MIN of 3, but that does not end a job whose ranks start again.
    for (fewest, restarts, due) in [(1, 1, 0), (1, 0, 6), (3, 1, 0)] {
        let options = format!("-n 3 --elastic {fewest}:3 --max-restarts {restarts}");
        let (status, out, errors) = shells(&options, script);
        assert!(status == Some(due) && !errors.contains("to join"), "{status:?} {out} {errors}");
        assert!(!errors.contains("the job ends"), "{errors}");
        assert!(due != 0 || (0..3).all(|rank| lines_of(&out, rank) == ["0"]), "{out} {errors}");
    }
    // A rank is lost before the others have it in a world.
    let early = job(&["-n", "3", "--elastic", "1:3", "--max-restarts", "1"], "fails early", None);
    gathered_on(early, 0..3, 3);
}

#[test]
fn ranks_that_have_met_have_met_whatever_becomes_of_their_files() {
    // Something cleans the folder of temporary files, and a newcomer says that it is in the run later.
    let script = "if [ ${WEFTGRAD_NEWCOMER:-0} = 1 ]; then touch $WEFTGRAD_MEMBER_FILE; exit $?; fi; \
                  touch $WEFTGRAD_MEMBER_FILE; sleep 2; \
                  if [ $RANK = 1 ]; then rm -r $(dirname $WEFTGRAD_MEMBER_FILE); exit 4; fi; sleep 2; echo whole";
    let (status, out, errors) = shells("-n 2 --elastic 1:2 --max-restarts 2", script);
    assert!(status == Some(0) && lines_of(&out, 0) == ["whole"], "{status:?} {out} {errors}");
    assert_eq!(errors.matches("rank 1 is started to join").count(), 1, "{errors}");
    assert!(!errors.contains("started again"), "{errors}");
}

#[test]
fn survivors_of_an_elastic_job_have_time_to_save() {
    let script = "touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 1 ]; then sleep 1; exit 4; fi; \
                  trap 'sleep 3; echo saved; exit 5' TERM; while true; do sleep 0.05; done";
    let (status, out, errors) = shells("-n 2 --elastic 2:2", script);
    assert!(status == Some(4) && lines_of(&out, 0) == ["saved"], "{status:?} {out} {errors}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_that_stays_stopped_makes_place_for_one_that_joins() {
    let scratch = Scratch::new("hung");
    let script = "touch $WEFTGRAD_MEMBER_FILE; if [ $RANK = 0 ]; then until [ -e $DIR/done ]; do sleep 0.01; done; exit 0; fi; \
                  if [ $TORCHELASTIC_RESTART_COUNT = 1 ]; then touch $DIR/done; exit 0; fi; kill -STOP $$";
    let mut command = launcher(&["-n", "2", "--elastic", "1:2", "--max-restarts", "1", "sh", "-c", script]);
    let (status, _, errors) = ended(command.env("DIR", scratch.path()).spawn().unwrap());
    assert!(status == Some(0) && errors.contains("rank 1 was killed by signal 9 (SIGKILL)"), "{status:?} {errors}");
}

#[test]
fn nodes_meet_at_an_endpoint_with_a_secret_and_start_again_together() {
    let scratch = Scratch::new("nodes");
    let secret = scratch.path().join("secret");
    fs::write(&secret, "0123456789abcdef0123456789abcdef\n").unwrap();
    for (role, restarts) in [("", "0"), ("fails early", "1"), ("fails late", "1")] {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let node = |node: &str| {
            let place = ["--nodes", "2", "--node-rank", node, "--endpoint", &free, "--max-restarts", restarts];
            job(&[&["-n", "2"], &place[..]].concat(), role, Some(&secret))
        };
        let nodes = ["0", "1"].map(node);
        for (rank, running) in [0, 2].into_iter().zip(nodes) {
            gathered_on(running, rank..rank + 2, 4);
        }
    }
    let (status, _, errors) = shells("-n 2 --nodes 2 --node-rank 0 --endpoint 127.0.0.1:9", "echo never");
    assert!(status == Some(2) && errors.contains("openssl rand -hex 32 > secret"), "{errors}");
}
