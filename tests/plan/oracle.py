"""The proven optimum of a step under a limit, by mixed-integer programming (HiGHS).

The formulation is Checkmate's (Jain et al., MLSys 2020) on values instead of op results, with in-place ops, ops that cannot run
again, and the rules of docs/design/planning.md: the program's own drops cost nothing, a pass frees only what it made, ghosts
do not outlive a pass.

Stage t = what happens before op t, and op t; stage n is the end of the step.
  R[t,i] in {0,1}   op i < t is run again in stage t               (only ops that may run again)
  S[t,v] in {0,1}   value v, held by the program, is there when stage t starts   (constant 1 for what cannot go)
  T[t,v,k] >= 0     v is a temporary of the pass of stage t from its making up to its k-th reader among ops < t (the last one: up
                    to op t itself, because op t reads it or because it stays)
minimise sum R[t,i] seconds[i], subject to
  dependences   R[t,i] <= S[t,w] + R[t,producer(w)]  for each input w of i;   1 <= S[t,w] + R[t,producer(w)]  for each input w of t
  carrying      S[t+1,v] <= S[t,v] + R[t,producer(v)] + [producer(v) = t]
  temporaries   T[t,v,k] >= R[t,k] - S[t,v];  T[t,v,end] >= S[t+1,v] - S[t,v];  T[t,v,end] >= 1 - S[t,v] if op t reads v;
                T[t,v,k] >= T[t,v,k+1]
  memory        base[t] + sum of T alive at i + R[t,i] (outputs of i + workspace of i) <= limit   for each i < t
                base[t] + sum of T alive at the end + outputs of t + workspace of t <= limit
"""
import time

import highspy
import numpy as np

INF = highspy.kHighsInf


class Oracle:
    def __init__(self, step, limit, unit=None):
        self.step, self.limit = step, limit
        self.unit = unit or max(v.bytes for v in step.values) / 16.0  # keeps coefficients near 1
        self.n = len(step.ops)
        self.cost, self.integer, self.upper = [], [], []
        self.rows_lower, self.rows_upper, self.starts, self.index, self.value = [], [], [], [], []
        self._prepare()
        self._build()

    def _prepare(self):
        step, n = self.step, self.n
        self.readers = [[] for _ in step.values]
        for i, op in enumerate(step.ops):
            for v in op.inputs:
                self.readers[v].append(i)
        self.born = [-1 if v.producer is None else v.producer for v in step.values]
        self.dies = [n if v.death is None else v.death for v in step.values]
        self.fixed = [v.producer is None or v.pinned or v.bytes == 0 for v in step.values]

    def _var(self, cost=0.0, integer=True, upper=1.0):
        self.cost.append(cost), self.integer.append(integer), self.upper.append(upper)
        return len(self.cost) - 1

    def _row(self, terms, lower=-INF, upper=INF):
        self.starts.append(len(self.index))
        merged = {}
        for var, coefficient in terms:
            merged[var] = merged.get(var, 0.0) + coefficient
        self.index += merged.keys()
        self.value += merged.values()
        self.rows_lower.append(lower), self.rows_upper.append(upper)

    def held(self, v, t):
        return self.born[v] < t <= self.dies[v]

    def can_replay(self, i):
        return i >= 0 and self.step.ops[i].replay == "yes"

    def _there(self, v, t):
        """Terms and constant of 'v can be read in stage t'."""
        terms, constant = [], 0.0
        if self.held(v, t):
            if self.fixed[v]:
                return [], 1.0
            terms.append((self.S[t, v], 1.0))
        if (t, self.born[v]) in self.R:
            terms.append((self.R[t, self.born[v]], 1.0))
        return terms, constant

    def _build(self):
        step, n = self.step, self.n
        self.R = {(t, i): self._var(step.ops[i].seconds * 1e3) for t in range(n + 1) for i in range(min(t, n)) if self.can_replay(i)}
        self.S = {(t, v): self._var() for v in range(len(step.values)) if not self.fixed[v]
                  for t in range(self.born[v] + 1, self.dies[v] + 1)}
        for t in range(n + 1):
            self._stage(t)

    def _stage(self, t):
        step, n = self.step, self.n
        if t < n:
            wanted = step.ops[t].inputs
        else:
            wanted = [v for v, value in enumerate(step.values) if value.death is None and value.needed_after]
        for w in wanted:
            terms, constant = self._there(w, t)
            if constant < 1:
                self._row(terms, lower=1.0)
        for i in range(min(t, n)):
            if (t, i) not in self.R:
                continue
            for w in step.ops[i].inputs:
                terms, constant = self._there(w, t)
                if constant < 1:
                    self._row([(self.R[t, i], 1.0)] + [(var, -c) for var, c in terms], upper=0.0)
        for v in range(len(step.values)):
            if (t, v) in self.S and (t + 1, v) in self.S:
                again = [(self.R[t, self.born[v]], -1.0)] if (t, self.born[v]) in self.R else []
                self._row([(self.S[t + 1, v], 1.0), (self.S[t, v], -1.0)] + again, upper=0.0)
        alive, ends = self._temporaries(t, wanted)
        constant = step.fixed_bytes + sum(step.values[v].bytes for v in range(len(step.values)) if self.fixed[v] and self.held(v, t))
        base = self._var(integer=False, upper=INF)
        self._row([(base, 1.0)] + [(self.S[t, v], -step.values[v].bytes / self.unit) for v in range(len(step.values))
                                   if (t, v) in self.S], lower=constant / self.unit, upper=constant / self.unit)
        room = self.limit / self.unit
        for i in range(min(t, n)):
            if (t, i) in self.R:
                fresh = step.ops[i].workspace + sum(step.values[v].bytes for v in step.ops[i].outputs if step.values[v].overwrites is None)
                self._row([(base, 1.0), (self.R[t, i], fresh / self.unit)] + alive.get(i, []), upper=room)
        fresh = 0
        if t < n:
            fresh = step.ops[t].workspace + sum(step.values[v].bytes for v in step.ops[t].outputs if step.values[v].overwrites is None)
        self._row([(base, 1.0)] + ends, upper=room - fresh / self.unit)

    def _temporaries(self, t, wanted):
        """Terms of the temporaries alive while op i of the pass runs, and of those alive at op t."""
        step, n = self.step, self.n
        alive, ends, wanted = {}, [], set(wanted)
        for v in range(len(step.values)):
            p = self.born[v]
            if p < 0 or p >= t or (t, p) not in self.R or step.values[v].bytes == 0:
                continue
            size = step.values[v].bytes / self.unit
            s = [(self.S[t, v], 1.0)] if (t, v) in self.S else []
            if self.held(v, t) and self.fixed[v]:
                continue  # is there anyway
            later = None
            if self.held(v, t):
                stays = v in wanted or (t + 1, v) in self.S
                if stays:
                    later = self._var(integer=False)
                    ends.append((later, size))
                    if v in wanted:
                        self._row([(later, 1.0)] + s, lower=1.0)
                    if (t + 1, v) in self.S:
                        self._row([(later, 1.0), (self.S[t + 1, v], -1.0)] + s, lower=0.0)
            reads = [k for k in self.readers[v] if k < t and (t, k) in self.R]
            stop = t  # the temporary `later` is alive at ops < stop and after the previous reader
            for k in reversed(reads):
                here = self._var(integer=False)
                self._row([(here, 1.0), (self.R[t, k], -1.0)] + s, lower=0.0)
                if later is not None:
                    self._row([(here, 1.0), (later, -1.0)], lower=0.0)
                    for i in range(k + 1, stop):
                        alive.setdefault(i, []).append((later, size))
                later, stop = here, k + 1
            if later is not None:
                for i in range(p + 1, stop):
                    alive.setdefault(i, []).append((later, size))
        return alive, ends

    def solve(self, seconds=60.0, start=None, threads=1):
        """Returns a dict: status, objective (ms), bound (ms), seconds. The schedule is read with schedule()."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.rows_lower)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.array(self.cost), np.zeros(len(self.cost)), np.array(self.upper)
        lp.row_lower_, lp.row_upper_ = np.array(self.rows_lower), np.array(self.rows_upper)
        lp.integrality_ = [highspy.HighsVarType.kInteger if b else highspy.HighsVarType.kContinuous for b in self.integer]
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self.starts + [len(self.index)])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = np.array(self.index), np.array(self.value)
        h = highspy.Highs()
        h.setOptionValue("output_flag", False)
        h.setOptionValue("time_limit", float(seconds))
        h.setOptionValue("threads", threads)
        h.setOptionValue("mip_rel_gap", 1e-3)
        h.setOptionValue("mip_feasibility_tolerance", 1e-7)
        h.passModel(lp)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self._start(start)
            h.setSolution(solution)
        began = time.time()
        h.run()
        status = h.getModelStatus()
        info = h.getInfo()
        out = {"seconds": time.time() - began, "status": h.modelStatusToString(status), "bound": info.mip_dual_bound,
               "proven": status == highspy.HighsModelStatus.kOptimal, "infeasible": status == highspy.HighsModelStatus.kInfeasible,
               "objective": None, "columns": lp.num_col_, "rows": lp.num_row_}
        if info.primal_solution_status == 2:
            self.x = np.array(h.getSolution().col_value)
            out["objective"] = info.objective_function_value
        return out

    def _start(self, schedule):
        """Column values of a schedule in the form of `memfit plan`: HiGHS completes the temporaries by itself only
        for a full set of integers, so the continuous ones are filled in by propagation here."""
        step, n = self.step, self.n
        x = np.zeros(len(self.cost))
        present = {v for v, value in enumerate(step.values) if value.producer is None}
        lists = {}
        for when, op, action, target, *_ in schedule["instructions"]:
            lists.setdefault((when, op), []).append((action, target))
        for t in range(n + 1):
            for (v) in list(present):
                if (t, v) in self.S:
                    x[self.S[t, v]] = 1.0
            for action, target in lists.get(("before", t), []):
                if action == "replay":
                    x[self.R[t, target]] = 1.0
                    for v in step.ops[target].outputs:
                        present.add(v)
                        if step.values[v].overwrites is not None:
                            present.discard(step.values[v].overwrites)
                else:
                    present.discard(target)
            if t == n:
                break
            for v in step.ops[t].outputs:
                present.add(v)
                if step.values[v].overwrites is not None:
                    present.discard(step.values[v].overwrites)
            for v, value in enumerate(step.values):
                if value.death == t:
                    present.discard(v)
            for action, target in lists.get(("after", t), []):
                present.discard(target)
        self._propagate(x)
        return x

    def _propagate(self, x):
        """The least continuous values that the rows ask for, last rows of a stage first (T[k] >= T[k+1])."""
        for _ in range(40):
            changed = False
            for row in range(len(self.starts)):
                a, b = self.starts[row], self.starts[row + 1] if row + 1 < len(self.starts) else len(self.index)
                first = self.index[a]
                if self.integer[first] or self.value[a] != 1.0 or self.rows_lower[row] == -INF:
                    continue
                need = self.rows_lower[row] - sum(self.value[k] * x[self.index[k]] for k in range(a + 1, b))
                if need > x[first] + 1e-9:
                    x[first] = need
                    changed = True
            if not changed:
                return

    def schedule(self):
        """The solution as a schedule that `memfit plan --check` judges."""
        step, n = self.step, self.n
        on = lambda var: self.x[var] > 0.5  # noqa: E731
        out = []
        present = {v for v, value in enumerate(step.values) if value.producer is None}
        for t in range(n + 1):
            ops = [i for i in range(min(t, n)) if (t, i) in self.R and on(self.R[t, i])]
            wanted = set(step.ops[t].inputs) if t < n else {v for v, value in enumerate(step.values) if value.death is None and value.needed_after}
            stays = {v for v in range(len(step.values)) if (t + 1, v) in self.S and on(self.S[t + 1, v])} | wanted
            made = set()
            for k, i in enumerate(ops):
                out.append(["before", t, "replay", i])
                eaten = {step.values[v].overwrites for v in step.ops[i].outputs}
                made |= {v for v in step.ops[i].outputs if v not in present}
                made -= eaten
                for v in sorted(made):
                    if v not in stays and not any(v in step.ops[j].inputs for j in ops[k + 1:]):
                        out.append(["before", t, "drop", v])
                        made.discard(v)
            present |= made
            if t == n:
                break
            present |= set(step.ops[t].outputs)
            present -= {step.values[v].overwrites for v in step.ops[t].outputs}
            present -= {v for v in present if step.values[v].death == t}
            for v in sorted(present):
                if (t + 1, v) in self.S and not on(self.S[t + 1, v]):
                    out.append(["after", t, "drop", v])
                    present.discard(v)
        return {"version": 1, "ops": n, "limit_bytes": int(self.limit), "instructions": out}
