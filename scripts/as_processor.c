/* Loaded twice into each program that scripts/as_processor.py starts, to hide features of this processor from it.
 *
 * As an auditor (LD_AUDIT) it replaces the CPUID instructions of the listed libraries by a breakpoint while they are
 * loaded, and answers CPUID there with the hidden bits cleared. As LD_PRELOAD it hides the flags in /proc/cpuinfo.
 * VTX_CPUID_TABLE: a file with lines "device inode offset...", a library each, offsets of CPUID in memory.
 * VTX_CPUID_KEEP: hexadecimal masks of leaf 7: EBX, ECX, EDX, then EAX and EDX of its subleaf 1.
 * VTX_CPUID_HIDDEN: the hidden flags, as /proc/cpuinfo names them. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { EBX7, ECX7, EDX7, EAX71, EDX71, WORDS };
static unsigned keep[WORDS];

static void fail(const char *reason, const char *name) {
  fprintf(stderr, "as_processor: %s: %s\n", name, reason);
  _exit(2);
}

/* The breakpoint (one byte) and a NOP stand where CPUID (two bytes) stood: the program goes on at the NOP. */
static void answer(int signal, siginfo_t *info, void *context) {
  (void)signal, (void)info;
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX], a, b, c, d;
  __cpuid_count(leaf, subleaf, a, b, c, d);
  if (leaf == 7 && subleaf == 0) b &= keep[EBX7], c &= keep[ECX7], d &= keep[EDX7];
  if (leaf == 7 && subleaf == 1) a &= keep[EAX71], d &= keep[EDX71];
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
}

static void replace_cpuid(char *base, char *offsets, const char *name) {
  const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
  for (char *rest = NULL, *word = strtok_r(offsets, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
    unsigned char *at = (unsigned char *)base + strtoul(word, NULL, 16);
    uintptr_t first = (uintptr_t)at & ~(page - 1), end = ((uintptr_t)(at + 2) + page - 1) & ~(page - 1);
    if (mprotect((void *)first, end - first, PROT_READ | PROT_WRITE | PROT_EXEC)) fail("its code is not writable", name);
    if (at[0] != 0x0f || at[1] != 0xa2) fail("it is not the library that was searched for CPUID", name);
    at[0] = 0xcc, at[1] = 0x90;
    mprotect((void *)first, end - first, PROT_READ | PROT_EXEC);
  }
}

unsigned la_version(unsigned version) {
  const char *masks = getenv("VTX_CPUID_KEEP");
  if (!masks || sscanf(masks, "%x %x %x %x %x", &keep[EBX7], &keep[ECX7], &keep[EDX7], &keep[EAX71], &keep[EDX71]) != WORDS)
    fail("five masks are needed", "VTX_CPUID_KEEP");
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
  sigaction(SIGTRAP, &action, NULL);
  (void)version;
  return LAV_CURRENT;
}

unsigned la_objopen(struct link_map *map, Lmid_t space, uintptr_t *cookie) {
  (void)space, (void)cookie;
  struct stat library;
  const char *table = getenv("VTX_CPUID_TABLE");
  if (!table || !*map->l_name || stat(map->l_name, &library)) return 0;
  FILE *file = fopen(table, "r");
  if (!file) fail("it cannot be read", table);
  char *line = NULL;
  size_t room = 0;
  while (getline(&line, &room, file) > 0) {
    unsigned long device, inode;
    int length = 0;
    if (sscanf(line, "%lu %lu %n", &device, &inode, &length) == 2 && device == library.st_dev && inode == library.st_ino)
      replace_cpuid((char *)map->l_addr, line + length, map->l_name);
  }
  free(line);
  fclose(file);
  return 0;
}

/* --- /proc/cpuinfo, copied into memory for each reader ------------------------------------------ */

static int is_hidden(const char *word) {
  const char *hidden = getenv("VTX_CPUID_HIDDEN");
  const size_t length = strlen(word);
  for (const char *at = hidden ? strstr(hidden, word) : NULL; at; at = strstr(at + 1, word))
    if ((at == hidden || at[-1] == ' ') && (at[length] == ' ' || !at[length])) return 1;
  return 0;
}

static int without_hidden(void) {
  int in = (int)syscall(SYS_openat, AT_FDCWD, "/proc/cpuinfo", O_RDONLY | O_CLOEXEC), out = memfd_create("cpuinfo", MFD_CLOEXEC);
  FILE *file = fdopen(in, "r");
  char *line = NULL;
  size_t room = 0;
  while (file && getline(&line, &room, file) > 0) {
    char *colon = strncmp(line, "flags", 5) ? NULL : strchr(line, ':');
    if (!colon) {
      dprintf(out, "%s", line);
      continue;
    }
    dprintf(out, "%.*s", (int)(colon + 1 - line), line);
    for (char *rest = NULL, *word = strtok_r(colon + 1, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest))
      if (!is_hidden(word)) dprintf(out, " %s", word);
    dprintf(out, "\n");
  }
  free(line);
  if (file) fclose(file);
  lseek(out, 0, SEEK_SET);
  return out;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define IS_CPUINFO(path) (!strcmp(path, "/proc/cpuinfo"))
#define MODE(flags) \
  va_list rest;     \
  va_start(rest, flags); \
  mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? (mode_t)va_arg(rest, int) : 0; \
  va_end(rest)
#define OPEN(name)                                                               \
  int name(const char *path, int flags, ...) {                                   \
    MODE(flags);                                                                 \
    return IS_CPUINFO(path) ? without_hidden() : REAL(name)(path, flags, mode);  \
  }
#define OPENAT(name)                                                                    \
  int name(int folder, const char *path, int flags, ...) {                              \
    MODE(flags);                                                                        \
    return IS_CPUINFO(path) ? without_hidden() : REAL(name)(folder, path, flags, mode); \
  }
#define FOPEN(name)                                                                         \
  FILE *name(const char *path, const char *mode) {                                          \
    return IS_CPUINFO(path) ? fdopen(without_hidden(), mode) : REAL(name)(path, mode);      \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)
