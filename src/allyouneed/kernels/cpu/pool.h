// Threads that share the work of a pass. A pass is a sequence of phases; a phase is a number of chunks that any thread
// may take, and it ends when all of them are done. No thread waits for another one that has taken no chunk, so a thread
// that the system does not run at the moment delays no other: they do its share. A thread without work spins for a
// short time and then sleeps, which leaves its core to others.
#pragma once

#if defined(__linux__) && !defined(PORTABLE)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <condition_variable>
#include <mutex>
#endif
#ifndef _WIN32
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <new>
#include <thread>

#include "vector.h"

namespace {

constexpr int IDLE_SPIN = 200;  // microseconds that a thread waits for the next pass before it sleeps
constexpr int HELD_SPIN = 30;   // and for a chunk that another thread works on
constexpr int MAX_CHUNKS = 0xffff;

struct Work {  // what the threads do together
    int phases;
    int (*chunks)(const Work&, int phase);  // at most MAX_CHUNKS
    void (*run)(const Work&, int phase, int chunk, int thread);
};

// A number that threads sleep on until it changes.
#if defined(__linux__) && !defined(PORTABLE)
struct Bell : std::atomic<uint32_t> {
    Bell() : std::atomic<uint32_t>(0) {}
    void sleep(uint32_t value) { call(FUTEX_WAIT, value); }
    void wake_all() { call(FUTEX_WAKE, INT_MAX); }

   private:
    void call(int operation, uint32_t value) {
        syscall(SYS_futex, (std::atomic<uint32_t>*)this, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
    }
};
#else
struct Bell : std::atomic<uint32_t> {
    Bell() : std::atomic<uint32_t>(0) {}
    void sleep(uint32_t value) {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [&] { return load(std::memory_order_seq_cst) != value; });
    }
    void wake_all() {
        { std::lock_guard<std::mutex> held(lock); }  // a thread that has compared, but does not sleep yet, holds it
        changed.notify_all();
    }

   private:
    std::mutex lock;
    std::condition_variable changed;
};
#endif

class Pool {
   public:
    // Run alone, where other threads are not wanted or busy with the pass of another caller.
    void execute(const Work& work, int threads) {
        if (threads < 2 || taken.exchange(true, std::memory_order_acquire)) {
            for (int phase = 0; phase < work.phases; phase++)
                for (int chunk = 0, count = work.chunks(work, phase); chunk < count; chunk++)
                    work.run(work, phase, chunk, 0);
            return;
        }
        start_workers(threads - 1);
        current = &work;
        active.store(threads, std::memory_order_relaxed);
        const uint32_t base = first = phase_of(ticket.load(std::memory_order_relaxed)), end = base + 1 + work.phases;
        open(base + 1);
        generation.fetch_add(1, std::memory_order_seq_cst);
        if (sleeping.load(std::memory_order_seq_cst)) generation.wake_all();
        for (uint64_t seen; phase_of(seen = ticket.load(std::memory_order_acquire)) != end;)
            if (!take(seen, 0)) wait_for_others(seen);
        taken.store(false, std::memory_order_release);
    }

   private:
    // phase (32 bits), its chunks (16), the next one to take (16)
    std::atomic<uint64_t> ticket{0};
    std::atomic<uint32_t> done{0}, sleeping{0}, waiting{0};
    Bell generation, advanced;
    std::atomic<int> active{0};
    std::atomic<bool> taken{false};
    const Work* current = nullptr;
    uint32_t first = 0;
    int workers = 0;

    static uint32_t phase_of(uint64_t seen) { return uint32_t(seen >> 32); }
    static bool has_chunk(uint64_t seen) { return (seen & 0xffff) < (seen >> 16 & 0xffff); }

    void start_workers(int wanted) {
        for (; workers < wanted; workers++) std::thread([this, number = workers + 1] { serve(number); }).detach();
    }

    // The next phase that has chunks, or the end.
    void open(uint32_t phase) {
        done.store(0, std::memory_order_relaxed);
        int chunks = 0;
        const uint32_t end = first + 1 + current->phases;
        while (phase != end && !(chunks = current->chunks(*current, int(phase - first - 1)))) phase++;
        ticket.store(uint64_t(phase) << 32 | uint64_t(chunks) << 16, std::memory_order_release);
        advanced.fetch_add(1, std::memory_order_seq_cst);
        if (waiting.load(std::memory_order_seq_cst)) advanced.wake_all();
    }

    // Take a chunk, if there is one. While it is not done the phase stays, and `current` is valid.
    bool take(uint64_t seen, int thread) {
        if (!has_chunk(seen)) return false;
        if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) return true;  // look again
        const uint32_t phase = phase_of(seen), chunks = seen >> 16 & 0xffff;
        current->run(*current, int(phase - first - 1), int(seen & 0xffff), thread);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) open(phase + 1);
        return true;
    }

    // Spin until the ticket changes, or for so long; whether it changed.
    bool spin(uint64_t seen, int microseconds) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
        do {
            for (int n = 0; n < 32; n++) {
                if (ticket.load(std::memory_order_acquire) != seen) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < end);
        return false;
    }

    // All chunks of the phase are taken. Asleep, so that the thread that holds one can run on this core.
    void wait_for_others(uint64_t seen) {
        if (spin(seen, HELD_SPIN)) return;
        const uint32_t before = advanced.load(std::memory_order_seq_cst);
        waiting.fetch_add(1, std::memory_order_seq_cst);
        if (ticket.load(std::memory_order_seq_cst) == seen) advanced.sleep(before);
        waiting.fetch_sub(1, std::memory_order_seq_cst);
    }

    void serve(int number) {
        for (;;) {
            const uint32_t before = generation.load(std::memory_order_seq_cst);
            const uint64_t seen = ticket.load(std::memory_order_acquire);
            const bool mine = number < active.load(std::memory_order_relaxed);
            if (mine && take(seen, number)) continue;
            if (spin(seen, IDLE_SPIN)) continue;
            sleeping.fetch_add(1, std::memory_order_seq_cst);
            generation.sleep(before);
            sleeping.fetch_sub(1, std::memory_order_seq_cst);
        }
    }
};

#ifdef _WIN32  // has no fork
inline int getpid() { return 1; }
using pid_t = int;
#endif

// The pool of this process; after a fork, which copies no threads, a new one. Never freed: its threads outlive `main`.
inline Pool& pool() {
    static std::atomic<Pool*> known{nullptr};
    static std::atomic<pid_t> owner{0};
    if (owner.load(std::memory_order_acquire) != getpid()) {
        static std::atomic_flag making = ATOMIC_FLAG_INIT;
        while (making.test_and_set(std::memory_order_acquire)) relax();
        if (owner.load(std::memory_order_acquire) != getpid()) {
            known.store(new Pool, std::memory_order_release);
            owner.store(getpid(), std::memory_order_release);
        }
        making.clear(std::memory_order_release);
    }
    return *known.load(std::memory_order_acquire);
}

}  // namespace
