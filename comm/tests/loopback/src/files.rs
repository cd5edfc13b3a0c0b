//! The engine: ranks that meet in a folder.

use std::{
    collections::BTreeMap,
    fs,
    panic::Location,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use numcore::{Result, Runtime, Tensor, TensorMut, ops::Input, ops::ViewOps};
use real_comm::{
    Call, Collective, Comm, Communicator, Fingerprint, Group, Guarantees, Pending, Places, ReduceOp, Work,
    engine::{Combiner, Failure, LEFT, Recorder, SplitPlace, Why, WireReader, Writer, disagreement, split_place},
};

/// What the ranks of a world share beside the folder: the first failure and what was called last.
struct World {
    folder: PathBuf,
    timeout: Duration,
    places: Places,
    failure: Mutex<Option<Failure>>,
    recorder: Mutex<Recorder>,
}

impl World {
    fn fail(&self, why: Why) -> Failure {
        let calls = self.recorder.lock().unwrap().lines();
        self.failure.lock().unwrap().get_or_insert(Failure { why, calls }).clone()
    }

    fn failure(&self) -> Option<Failure> {
        self.failure.lock().unwrap().clone()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

struct FileCommunicator<R: Runtime> {
    world: Arc<World>,
    of: Group,
    /// What its files begin with.
    name: String,
    rt: R,
    numbers: AtomicU64,
    counts: Mutex<BTreeMap<String, u64>>,
}

/// One rank's part of a call: what it reads, fills and waits for.
struct Part<R: Runtime> {
    world: Arc<World>,
    of: Group,
    name: String,
    key: String,
    rt: R,
    call: Fingerprint,
    send: Vec<usize>,
    recv: Vec<usize>,
    peers: Vec<usize>,
}

type Slot<R> = Arc<(Mutex<Option<Result<Option<TensorMut<R>>, Failure>>>, Condvar)>;

impl<R: Runtime> FileCommunicator<R> {
    fn join(world: &Arc<World>, of: Group, name: String, rt: R) -> Self {
        let (numbers, counts) = (AtomicU64::new(0), Mutex::default());
        FileCommunicator { world: world.clone(), of, name, rt, numbers, counts }
    }

    fn next(&self, key: &str) -> u64 {
        let mut counts = self.counts.lock().unwrap();
        let count = counts.entry(key.into()).or_default();
        *count += 1;
        *count - 1
    }
}

impl<R: Runtime> Communicator<R> for FileCommunicator<R> {
    fn group(&self) -> &Group {
        &self.of
    }

    fn runtime(&self) -> &R {
        &self.rt
    }

    fn timeout(&self) -> Duration {
        self.world.timeout
    }

    fn guarantees(&self) -> Guarantees {
        Guarantees::STRICT
    }

    fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    fn start(&self, call: Call<R>) -> Result<Work<Option<TensorMut<R>>>> {
        let (what, op, rank) = (call.what(), call.what().name(), self.rank());
        self.poll()?;
        let line = match what {
            Collective::Send { to } => format!("{rank}-{to}"),
            Collective::Recv { from } => format!("{from}-{rank}"),
            _ => "all".into(),
        };
        let number = self.next(&line);
        let peers = what.peer().map_or_else(|| (0..self.size()).filter(|&r| r != rank).collect(), |peer| vec![peer]);
        let part = Part {
            world: self.world.clone(),
            of: self.of.clone(),
            name: self.name.clone(),
            key: format!("{line}-{number}"),
            rt: self.rt.fork()?,
            call: call.fingerprint(),
            send: call.send_parts().to_vec(),
            recv: call.recv_parts().to_vec(),
            peers,
        };
        self.world.recorder.lock().unwrap().note(
            self.world_rank(),
            self.of.members().clone(),
            number,
            part.call.clone(),
        );
        let slot: Slot<R> = Arc::default();
        let (own, world_rank) = (slot.clone(), self.world_rank());
        thread::spawn(move || {
            let (input, output) = call.into_memory();
            let done = part.run(input, output);
            drop(part);
            *own.0.lock().unwrap() = Some(done);
            own.1.notify_all();
        });
        Ok(Work::pending(Posted { slot, op, world_rank }))
    }

    fn split_at(&self, color: Option<usize>, key: usize, at: &'static Location<'static>) -> Result<Option<Comm<R>>> {
        let place = split_place(self, color, key, at)?;
        let number = self.next("split");
        let Some(SplitPlace { color, rank, members }) = place else { return Ok(None) };
        let of = Group::new("split", rank, members.into());
        let name = format!("{}-{number}.{color}", self.name);
        Ok(Some(Arc::new(FileCommunicator::join(&self.world, of, name, self.rt.clone()))))
    }

    fn poll(&self) -> Result<()> {
        self.world.failure().map_or(Ok(()), |failure| Err(failure.error("poll", self.world_rank())))
    }

    fn abort_for(&self, world_rank: usize, cause: &str) {
        self.world.fail(Why::Peer { peer: world_rank, cause: cause.into() });
    }
}

impl<R: Runtime> Drop for FileCommunicator<R> {
    fn drop(&mut self) {
        let _ = fs::write(self.world.folder.join(format!("{}-left-{}", self.name, self.of.rank())), []);
    }
}

impl<R: Runtime> std::fmt::Debug for FileCommunicator<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileCommunicator({})", self.of)
    }
}

impl<R: Runtime> Part<R> {
    fn file(&self, from: usize, to: usize) -> PathBuf {
        self.world.folder.join(format!("{}-{}-{from}-{to}", self.name, self.key))
    }

    fn run(&self, input: Option<Tensor<R>>, output: Option<TensorMut<R>>) -> Result<Option<TensorMut<R>>, Failure> {
        let peer = self.of.world_rank();
        let met = self.meet(input.as_ref(), output.as_ref()).map_err(|why| self.world.fail(why))?;
        let result = self.compute(&met, input, output);
        result.map_err(|e| self.world.fail(Why::Peer { peer, cause: e.to_string() }))
    }

    /// What every rank contributes.
    fn meet(&self, input: Option<&Tensor<R>>, output: Option<&TensorMut<R>>) -> Result<Vec<Vec<u8>>, Why> {
        let own = self.own(input, output).map_err(|e| self.why(&e.to_string()))?;
        let mut w = Writer::default();
        w.bytes(&self.call.to_bytes()).list(&self.send).list(&self.recv).bytes(&own);
        let bytes = w.finish();
        for &to in &self.peers {
            let place = self.file(self.of.rank(), to);
            let made = PathBuf::from(format!("{}.new", place.display()));
            fs::write(&made, &bytes).and_then(|()| fs::rename(made, place)).map_err(|e| self.why(&e.to_string()))?;
        }
        let mut all = vec![Vec::new(); self.of.size()];
        all[self.of.rank()] = own;
        let mut parts = vec![(self.send.clone(), self.recv.clone()); self.of.size()];
        let (begun, mut absent) = (Instant::now(), self.peers.clone());
        while !absent.is_empty() {
            if let Some(failure) = self.world.failure() {
                return Err(failure.why);
            }
            for from in std::mem::take(&mut absent) {
                let left = self.world.folder.join(format!("{}-left-{from}", self.name)).exists();
                match (fs::read(self.file(from, self.of.rank())), left) {
                    (Ok(bytes), _) => (all[from], parts[from]) = self.compare(from, &bytes)?,
                    (Err(_), false) => absent.push(from),
                    (Err(_), true) => return Err(self.deserted(from)),
                }
            }
            if begun.elapsed() > self.world.timeout && !absent.is_empty() {
                let missing = absent.into_iter().map(|r| self.of.members()[r]).collect();
                return Err(Why::Timeout { waited: begun.elapsed(), missing, called: false });
            }
            thread::sleep(Duration::from_micros(200));
        }
        self.check_pairs(&parts)?;
        Ok(all)
    }

    /// The bytes this rank sends.
    fn own(&self, input: Option<&Tensor<R>>, output: Option<&TensorMut<R>>) -> Result<Vec<u8>> {
        if let (Collective::Recv { .. } | Collective::Barrier, _) | (_, (None, None)) =
            (self.call.what, (input, output))
        {
            return Ok(Vec::new());
        }
        match (input, output) {
            (Some(input), _) => input.to_bytes(),
            (None, Some(output)) => {
                let mut bytes = vec![0; output.shape().numel() * output.dtype().size()];
                output.copy_to_host(&mut bytes).map(|()| bytes)
            }
            (None, None) => Ok(Vec::new()),
        }
    }

    /// What a rank contributes to this one, and its parts.
    fn compare(&self, from: usize, bytes: &[u8]) -> Result<(Vec<u8>, (Vec<usize>, Vec<usize>)), Why> {
        let read = || -> Result<_> {
            let mut r = WireReader::new(bytes);
            Ok((Fingerprint::from_bytes(r.bytes()?)?, r.list()?, r.list()?, r.bytes()?.to_vec()))
        };
        let (call, send, recv, bytes) = read().map_err(|e| self.why(&e.to_string()))?;
        let (own, other) = ((self.of.rank(), &self.call), (from, &call));
        let (first, second) = if from < self.of.rank() { (other, own) } else { (own, other) };
        if let Some(why) = disagreement(self.of.members(), first, second, self.world.places) {
            return Err(Why::Mismatch { why });
        }
        if self.call.what != Collective::AllToAll {
            return Ok((bytes, (send, recv)));
        }
        let (to, size) = (self.of.rank(), call.dtype.size());
        let start: usize = send[..to].iter().sum::<usize>() * size;
        Ok((bytes[start..start + send[to] * size].to_vec(), (send, recv)))
    }

    /// What each rank sends to each must be what that one expects.
    fn check_pairs(&self, parts: &[(Vec<usize>, Vec<usize>)]) -> Result<(), Why> {
        let n = if self.call.what == Collective::AllToAll { self.of.size() } else { 0 };
        let pairs = (0..n).flat_map(|from| (0..n).map(move |to| (from, to)));
        for (from, to) in pairs {
            let (sent, wanted, [from, to]) =
                (parts[from].0[to], parts[to].1[from], [from, to].map(|r| self.of.members()[r]));
            if sent != wanted {
                let why = format!("rank {from} sends {sent} elements to rank {to}, which expects {wanted}");
                return Err(Why::Mismatch { why: numcore::Error::argument("all_to_all", why).to_string() });
            }
        }
        Ok(())
    }

    fn why(&self, cause: &str) -> Why {
        Why::Peer { peer: self.of.world_rank(), cause: cause.into() }
    }

    fn deserted(&self, from: usize) -> Why {
        // Its own words, if it failed, come first.
        thread::sleep(Duration::from_millis(50));
        let call = self.call.in_world(self.of.members());
        let cause = format!("{LEFT} while rank {} called {call}", self.of.world_rank());
        self.world.failure().map_or(Why::Peer { peer: self.of.members()[from], cause }, |failure| failure.why)
    }

    /// This rank's result from what all contributed.
    fn compute(
        &self,
        all: &[Vec<u8>],
        input: Option<Tensor<R>>,
        output: Option<TensorMut<R>>,
    ) -> Result<Option<TensorMut<R>>> {
        let (rank, dtype, Some(out)) = (self.of.rank(), self.call.dtype, output) else { return Ok(None) };
        let row = |bytes: &[u8]| Tensor::from_bytes(&self.rt, [bytes.len() / dtype.size()].into(), dtype, bytes);
        let values = all.iter().map(|bytes| row(bytes)).collect::<Result<Vec<_>>>()?;
        let lens = match self.call.what {
            Collective::AllGather | Collective::AllToAll => self.recv.clone(),
            Collective::ReduceScatter(_) if input.is_none() => self.send.clone(),
            _ => vec![out.shape().numel()],
        };
        let (mut pieces, mut combiner) = (out.split(&lens)?, Combiner::new(self.rt.clone()));
        let start = |part: usize| self.send[..part].iter().sum::<usize>();
        match self.call.what {
            Collective::AllReduce(op) => combine(&mut combiner, op, &values, &mut pieces[0])?,
            Collective::Reduce { op, root } if root == rank => combine(&mut combiner, op, &values, &mut pieces[0])?,
            Collective::ReduceScatter(op) => {
                let own =
                    values.iter().map(|x| x.narrow(0, start(rank), self.send[rank])).collect::<Result<Vec<_>>>()?;
                let at = if input.is_none() { rank } else { 0 };
                combine(&mut combiner, op, &own, &mut pieces[at])?;
            }
            Collective::Broadcast { root } => combiner.copy(Input::Value(&values[root]), &mut [&mut pieces[0]])?,
            Collective::Recv { from } => combiner.copy(Input::Value(&values[from]), &mut [&mut pieces[0]])?,
            Collective::AllGather => {
                for (r, piece) in pieces.iter_mut().enumerate() {
                    let whole = input.is_none();
                    let part = if whole { values[r].narrow(0, start(r), self.recv[r])? } else { values[r].clone() };
                    combiner.copy(Input::Value(&part), &mut [piece])?;
                }
            }
            Collective::AllToAll => {
                for (r, piece) in pieces.iter_mut().enumerate() {
                    let own = r == rank;
                    let part = if own { values[r].narrow(0, start(r), self.send[r])? } else { values[r].clone() };
                    combiner.copy(Input::Value(&part), &mut [piece])?;
                }
            }
            _ => {}
        }
        TensorMut::join(pieces).map(Some)
    }
}

fn combine<R: Runtime>(by: &mut Combiner<R>, op: ReduceOp, all: &[Tensor<R>], out: &mut TensorMut<R>) -> Result<()> {
    let ins: Vec<Input<'_, R>> = all.iter().map(Input::Value).collect();
    by.reduce(op, &ins, &mut [out])
}

struct Posted<R: Runtime> {
    slot: Slot<R>,
    op: &'static str,
    world_rank: usize,
}

impl<R: Runtime> Pending<Option<TensorMut<R>>> for Posted<R> {
    fn wait(self: Box<Self>) -> Result<Option<TensorMut<R>>> {
        let mut done = self.slot.0.lock().unwrap();
        loop {
            match done.take() {
                Some(done) => return done.map_err(|failure| failure.error(self.op, self.world_rank)),
                None => done = self.slot.1.wait(done).unwrap(),
            }
        }
    }

    fn is_done(&self) -> bool {
        self.slot.0.lock().unwrap().is_some()
    }
}

/// The communicators of a world in a folder of its own.
pub(crate) fn world<R: Runtime>(runtimes: Vec<R>, timeout: Duration, places: Places) -> Result<Vec<Comm<R>>> {
    static WORLDS: AtomicU64 = AtomicU64::new(0);
    let (n, number) = (runtimes.len(), WORLDS.fetch_add(1, Ordering::Relaxed));
    let folder = std::env::temp_dir().join(format!("loopback-{}-{number}", std::process::id()));
    fs::create_dir_all(&folder).map_err(|e| numcore::Error::argument("loopback", e.to_string()))?;
    let (failure, recorder) = (Mutex::default(), Mutex::new(Recorder::new(n)));
    let world = Arc::new(World { folder, timeout, places, failure, recorder });
    let rank = |(rank, rt)| Arc::new(FileCommunicator::join(&world, Group::world(rank, n), "w".into(), rt)) as Comm<R>;
    Ok(runtimes.into_iter().enumerate().map(rank).collect())
}
